/* The loop between TUN and socket. */
#ifndef FLANNEL_PUMP_H
#define FLANNEL_PUMP_H

#include <netinet/in.h>
#include <stdatomic.h>

#include "coalesce.h"
#include "routes.h"

enum {
    RUNS = 16,
    RUN_SEGMENTS = 64, /* UDP_MAX_SEGMENTS of kernels before 6.9 */
    OUT_BYTES = 256 << 10,
    OUT_HEADERS = 1024,
    IN_BYTES = 512 << 10,
    IN_MESSAGES = 64,
};

/* In the order of COUNTERS in api.py. */
enum counter {
    TX_PACKETS, TX_BYTES, TX_MESSAGES, RX_PACKETS, RX_BYTES, RX_WRITES, NO_ROUTE, TTL_EXCEEDED, TOO_BIG, MALFORMED,
    ICMP_SENT, TX_DROPPED, RX_DROPPED, UNKNOWN_SENDER, COUNTERS
};

/* Packets to one next hop, all of one size but for the last, which may be shorter. */
struct run {
    struct address hop;
    size_t size, bytes;
    unsigned segments;
    int parts;
    bool ended;
    uint16_t begins[RUN_SEGMENTS + 1]; /* which part each segment begins with */
    struct iovec part[2 * RUN_SEGMENTS];
};

struct pump {
    int tun, sock, wake; /* wake is an eventfd, of the pump; the others are the caller's */
    int version;         /* of the packets, and of those they travel in */
    bool vnet, gso;
    uint16_t port, mtu;
    int gone;            /* the error that ended the loop */
    atomic_bool stop;
    _Atomic(struct routes *) next; /* to be taken over by the loop */
    struct routes *routes;
    atomic_ulong count[COUNTERS];
    double icmp_tokens, icmp_filled_s;
    unsigned open;
    struct run runs[RUNS];
    size_t headers_used;
    uint8_t (*headers)[HEADERS_MAX];
    uint8_t *out, *in;
    struct coalescer coalescer;
};

/* Returns NULL with errno. */
struct pump *pump_new(int version, int tun, int sock, bool vnet, bool tso, bool uso, bool gso, uint16_t port,
                      uint16_t mtu);
void pump_free(struct pump *p);

/* Returns 0 once stopped, the errno of the TUN when that is gone. */
int pump_run(struct pump *p);

/* These two may be called from any thread. */
void pump_stop(struct pump *p);
void pump_forward(struct pump *p, struct routes *routes);

#endif
