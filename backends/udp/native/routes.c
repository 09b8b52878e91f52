#include "routes.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SLOTS = 1 << 18 };

static bool ascending(const struct range *ranges, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (ranges[i].first > ranges[i].last || ranges[i].hop == 0)
            return false;
        if (i && ranges[i].first <= ranges[i - 1].last)
            return false;
    }
    return true;
}

/* The coarsest slots of which none holds an end of a range inside, or as fine as memory allows. */
static unsigned pick_shift(const struct range *ranges, size_t count)
{
    uint32_t ends = 0;
    for (size_t i = 0; i < count; i++)
        ends |= ranges[i].first | (ranges[i].last + 1);
    unsigned shift = 0;
    while (shift < 31 && !(ends >> shift & 1))
        shift++;
    while ((ranges[count - 1].last >> shift) - (ranges[0].first >> shift) >= MAX_SLOTS)
        shift++;
    return shift;
}

static bool index_ranges(struct routes *r)
{
    r->shift = pick_shift(r->ranges, r->count);
    r->base = r->ranges[0].first >> r->shift;
    r->slots = (size_t)(r->ranges[r->count - 1].last >> r->shift) - r->base + 1;
    r->start = malloc((r->slots + 1) * sizeof *r->start);
    if (!r->start)
        return false;
    size_t passed = 0;
    for (size_t slot = 0; slot <= r->slots; slot++) {
        uint64_t address = ((uint64_t)r->base + slot) << r->shift;
        while (passed < r->count && r->ranges[passed].last < address)
            passed++;
        r->start[slot] = (uint32_t)passed;
    }
    return true;
}

struct routes *routes_new(const void *packed, size_t count, uint32_t own, uint32_t overlay)
{
    struct routes *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->own = own;
    r->overlay = overlay;
    r->count = count;
    if (!count)
        return r;
    r->ranges = calloc(count, sizeof *r->ranges);
    if (!r->ranges)
        goto out;
    memcpy(r->ranges, packed, count * sizeof *r->ranges);
    if (!ascending(r->ranges, count)) {
        routes_free(r);
        errno = EINVAL;
        return NULL;
    }
    if (index_ranges(r))
        return r;
out:
    routes_free(r);
    errno = ENOMEM;
    return NULL;
}

void routes_free(struct routes *routes)
{
    if (!routes)
        return;
    free(routes->ranges);
    free(routes->start);
    free(routes);
}

uint32_t routes_hop(const struct routes *r, uint32_t destination)
{
    uint32_t slot = (destination >> r->shift) - r->base; /* wraps below the base: too large */
    if (slot >= r->slots)
        return 0;
    size_t low = r->start[slot], high = r->start[slot + 1];
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (r->ranges[middle].last < destination)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == r->count || r->ranges[low].first > destination)
        return 0;
    return r->ranges[low].hop;
}
