/* Next hop of a destination: disjoint ascending ranges behind a direct table. */
#ifndef FLANNEL_ROUTES_H
#define FLANNEL_ROUTES_H

#include <stddef.h>
#include <stdint.h>

#include "packet.h"

struct range {
    struct address first, last, hop;
};

struct routes {
    struct address own, overlay; /* sources of ICMP errors to remote and to local senders, zero: none */
    size_t count;
    struct range *ranges;
    unsigned window; /* the lowest of the 32 bits of an address that the table looks at */
    unsigned shift;  /* and how many of these share a slot, as a power of two */
    uint32_t base;
    size_t slots;
    bool closed;     /* datagrams are taken from these addresses only, in ascending order */
    size_t peers;
    struct address *peer;
    uint32_t *start; /* per slot, and one more: how many ranges end before it */
};

/* ``packed`` holds count triples first, last, hop: numbers of 32 bits in native order (version 4), or addresses as on
 * the wire (version 6). Returns NULL with errno EINVAL unless they ascend without overlap, or ENOMEM. */
struct routes *routes_new(int version, const void *packed, size_t count, struct address own, struct address overlay);
void routes_free(struct routes *routes);

/* From now on takes datagrams from these addresses only, packed like one of a triple. Returns false with errno. */
bool routes_close(struct routes *routes, int version, const void *packed, size_t count);

/* Whether datagrams are taken from an address. */
bool routes_admit(const struct routes *routes, struct address sender);

/* Returns the next hop, zero if there is no route. */
struct address routes_hop(const struct routes *routes, struct address destination);

#endif
