#include "routes.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SLOTS = 1 << 18 };

static bool ascending(const struct range *ranges, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (address_less(ranges[i].last, ranges[i].first) || !address_set(ranges[i].hop))
            return false;
        if (i && !address_less(ranges[i - 1].last, ranges[i].first))
            return false;
    }
    return true;
}

/* The 32 bits of an address that tell the ranges apart. */
static uint32_t looked_at(const struct routes *r, struct address a)
{
    if (r->window >= 64)
        return (uint32_t)(a.high >> (r->window - 64));
    return (uint32_t)(a.low >> r->window | (r->window ? a.high << (64 - r->window) : 0));
}

/* Behind what all ranges have in common: an address outside them is refused beforehand. */
static unsigned pick_window(const struct range *ranges, size_t count)
{
    uint64_t high = ranges[0].first.high ^ ranges[count - 1].last.high;
    uint64_t low = ranges[0].first.low ^ ranges[count - 1].last.low;
    unsigned bits = high ? 128 - (unsigned)__builtin_clzll(high) : low ? 64 - (unsigned)__builtin_clzll(low) : 0;
    return bits > 32 ? bits - 32 : 0;
}

/* The coarsest slots of which none holds an end of a range inside, or as fine as memory allows. */
static unsigned pick_shift(const struct routes *r)
{
    uint32_t ends = 0, lowest = looked_at(r, r->ranges[0].first), highest = looked_at(r, r->ranges[r->count - 1].last);
    for (size_t i = 0; i < r->count; i++)
        ends |= looked_at(r, r->ranges[i].first) | (looked_at(r, r->ranges[i].last) + 1);
    unsigned shift = 0;
    while (shift < 31 && !(ends >> shift & 1))
        shift++;
    while ((highest >> shift) - (lowest >> shift) >= MAX_SLOTS)
        shift++;
    return shift;
}

static bool index_ranges(struct routes *r)
{
    r->window = pick_window(r->ranges, r->count);
    r->shift = pick_shift(r);
    r->base = looked_at(r, r->ranges[0].first) >> r->shift;
    r->slots = (size_t)(looked_at(r, r->ranges[r->count - 1].last) >> r->shift) - r->base + 1;
    r->start = malloc((r->slots + 1) * sizeof *r->start);
    if (!r->start)
        return false;
    size_t passed = 0;
    for (size_t slot = 0; slot <= r->slots; slot++) {
        uint64_t begins = ((uint64_t)r->base + slot) << r->shift;
        while (passed < r->count && looked_at(r, r->ranges[passed].last) < begins)
            passed++;
        r->start[slot] = (uint32_t)passed;
    }
    return true;
}

static struct address unpacked(int version, const uint8_t *packed, size_t number)
{
    struct address a = {0, 0};
    uint32_t value;
    if (version == 6)
        return address_at(6, packed + number * 16);
    memcpy(&value, packed + number * 4, 4);
    a.low = value;
    return a;
}

struct routes *routes_new(int version, const void *packed, size_t count, struct address own, struct address overlay)
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
    for (size_t i = 0; i < count; i++)
        r->ranges[i] = (struct range){unpacked(version, packed, 3 * i), unpacked(version, packed, 3 * i + 1),
                                      unpacked(version, packed, 3 * i + 2)};
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

bool routes_close(struct routes *r, int version, const void *packed, size_t count)
{
    r->peer = calloc(count + 1, sizeof *r->peer);
    if (!r->peer)
        return false;
    for (size_t i = 0; i < count; i++) {
        r->peer[i] = unpacked(version, packed, i);
        if (i && !address_less(r->peer[i - 1], r->peer[i])) {
            errno = EINVAL;
            return false;
        }
    }
    r->peers = count;
    r->closed = true;
    return true;
}

bool routes_admit(const struct routes *r, struct address sender)
{
    if (!r->closed)
        return true;
    size_t low = 0, high = r->peers;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (address_less(r->peer[middle], sender))
            low = middle + 1;
        else
            high = middle;
    }
    return low < r->peers && address_equal(r->peer[low], sender);
}

void routes_free(struct routes *routes)
{
    if (!routes)
        return;
    free(routes->peer);
    free(routes->ranges);
    free(routes->start);
    free(routes);
}

struct address routes_hop(const struct routes *r, struct address destination)
{
    static const struct address none;
    if (!r->count || address_less(destination, r->ranges[0].first) ||
        address_less(r->ranges[r->count - 1].last, destination))
        return none;
    uint32_t slot = (looked_at(r, destination) >> r->shift) - r->base;
    size_t low = r->start[slot], high = r->start[slot + 1];
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (address_less(r->ranges[middle].last, destination))
            low = middle + 1;
        else
            high = middle;
    }
    return address_less(destination, r->ranges[low].first) ? none : r->ranges[low].hop;
}
