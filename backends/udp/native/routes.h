/* Next hop of a destination: disjoint ascending ranges behind a direct table. */
#ifndef FLANNEL_ROUTES_H
#define FLANNEL_ROUTES_H

#include <stddef.h>
#include <stdint.h>

struct range {
    uint32_t first, last, hop;
};

struct routes {
    uint32_t own, overlay; /* sources of ICMP errors to remote and to local senders, 0: none */
    size_t count;
    struct range *ranges;
    unsigned shift;
    uint32_t base;
    size_t slots;
    uint32_t *start; /* per slot, and one more: how many ranges end before it */
};

/* ``packed`` holds count triples first, last, hop in native order. Returns NULL with errno EINVAL unless they
 * ascend without overlap, or ENOMEM. */
struct routes *routes_new(const void *packed, size_t count, uint32_t own, uint32_t overlay);
void routes_free(struct routes *routes);

/* Returns the next hop, 0 if there is no route. */
uint32_t routes_hop(const struct routes *routes, uint32_t destination);

#endif
