/* Merges consecutive packets of one flow into the super-packet they were cut from (what a NIC does with GRO),
 * so that the kernel handles them once. */
#ifndef FLANNEL_COALESCE_H
#define FLANNEL_COALESCE_H

#include <sys/uio.h>

#include "segment.h"

enum { FLOWS = 16, TCP_MERGED = 256, UDP_MERGED = 64 };

struct flow {
    bool used, ended;
    const uint8_t *first; /* the first packet, unchanged */
    size_t header;        /* length of its headers */
    size_t size;          /* payload bytes of every packet but the last */
    size_t payload;       /* bytes in all */
    unsigned packets;
    uint8_t last_flags;   /* TCP flags of the last packet */
    uint8_t head[VNET + HEADERS_MAX];
    struct iovec parts[1 + TCP_MERGED];
};

struct coalescer {
    bool tcp, udp;        /* what the kernel takes merged */
    /* Called with one packet behind its vnet header; packets are those it carries. */
    void (*write)(void *context, const struct iovec *parts, int count, unsigned packets);
    void *context;
    unsigned oldest;      /* the flow to close when one more is needed */
    struct flow flows[FLOWS];
};

void coalesce_init(struct coalescer *c, bool tcp, bool udp,
                   void (*write)(void *, const struct iovec *, int, unsigned), void *context);

/* Takes a packet of that length that passed ip_check. It must stay in place until coalesce_flush. */
void coalesce(struct coalescer *c, const uint8_t *packet, size_t total);

/* Writes everything that is held back. */
void coalesce_flush(struct coalescer *c);

#endif
