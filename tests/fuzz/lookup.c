/* Input: family, whether prefixes, ranges or peers follow and how many; these, then addresses to look up. */
#include <errno.h>

#include "fuzz.h"
#include "routes.h"

enum { MOST = 24 };

typedef unsigned __int128 number;

struct prefix {
    number first, last;
    struct address hop;
};

static number number_of(struct address a) { return (number)a.high << 64 | a.low; }

static struct address address_of(number n) { return (struct address){(uint64_t)(n >> 64), (uint64_t)n}; }

static number take_number(struct input *in, int version)
{
    number n = take32(in);
    for (int i = 0; version == 6 && i < 3; i++)
        n = n << 32 | take32(in);
    return n;
}

/* The longest prefix that holds the address wins; of equal ones the first. */
static struct address longest(const struct prefix *prefixes, size_t count, number address)
{
    const struct prefix *found = NULL;
    for (size_t i = 0; i < count; i++)
        if (prefixes[i].first <= address && address <= prefixes[i].last &&
            (!found || prefixes[i].last - prefixes[i].first < found->last - found->first))
            found = &prefixes[i];
    return found ? found->hop : (struct address){0, 0};
}

static void pack_number(int version, uint8_t *to, size_t index, number n)
{
    uint32_t value = (uint32_t)n;
    if (version == 6)
        put_address(6, to + 16 * index, address_of(n));
    else
        memcpy(to + 4 * index, &value, 4);
}

static int by_number(const void *a, const void *b)
{
    number x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return x < y ? -1 : x > y;
}

/* Writes one range between any two neighbouring ends of prefixes, where some prefix holds it. */
static size_t ranges_of(const struct prefix *prefixes, size_t count, int version, uint8_t *packed)
{
    number begins[2 * MOST], most = version == 6 ? ~(number)0 : 0xffffffff;
    size_t n = 0, written = 0;
    for (size_t i = 0; i < count; i++) {
        begins[n++] = prefixes[i].first;
        if (prefixes[i].last < most)
            begins[n++] = prefixes[i].last + 1;
    }
    qsort(begins, n, sizeof *begins, by_number);
    for (size_t i = 0; i < n; i++) {
        number last = i + 1 < n ? begins[i + 1] - 1 : most;
        struct address hop = longest(prefixes, count, begins[i]);
        if ((i + 1 < n && begins[i + 1] == begins[i]) || !address_set(hop))
            continue;
        pack_number(version, packed, written++, begins[i]);
        pack_number(version, packed, written++, last);
        pack_number(version, packed, written++, number_of(hop));
    }
    return written / 3;
}

static void check_prefixes(struct input *in, int version, size_t count)
{
    static const struct address none;
    struct prefix prefixes[MOST];
    number most = version == 6 ? ~(number)0 : 0xffffffff;
    unsigned bits = version == 6 ? 128 : 32;
    for (size_t i = 0; i < count; i++) {
        unsigned free_bits = take8(in) % (bits + 1);
        number mask = free_bits == 128 ? most : ((number)1 << free_bits) - 1;
        prefixes[i].first = take_number(in, version) & ~mask & most;
        prefixes[i].last = prefixes[i].first | (mask & most);
        prefixes[i].hop = (struct address){0, 1 + i};
    }
    uint8_t *packed = allocate(2 * MOST * 3 * 16);
    size_t n = ranges_of(prefixes, count, version, packed);
    uint8_t *exact = copied(packed, n * 3 * (version == 6 ? 16 : 4));
    struct routes *routes = routes_new(version, exact, n, none, none);
    REQUIRE(routes);
    for (size_t i = 0; i < count; i++) {
        number near[] = {prefixes[i].first, prefixes[i].last, prefixes[i].first - 1, prefixes[i].last + 1};
        for (int j = 0; j < 4; j++)
            REQUIRE(address_equal(routes_hop(routes, address_of(near[j] & most)),
                                  longest(prefixes, count, near[j] & most)));
    }
    while (in->left) {
        number address = take_number(in, version);
        REQUIRE(address_equal(routes_hop(routes, address_of(address)), longest(prefixes, count, address)));
    }
    routes_free(routes);
    free(exact);
    free(packed);
}

/* Anything at all: refused unless it ascends, and then found by going through it. */
static void check_ranges(struct input *in, int version, size_t count)
{
    static const struct address none;
    number n[3 * MOST];
    int ascends = 1;
    uint8_t *packed = allocate(3 * count * (version == 6 ? 16 : 4));
    for (size_t i = 0; i < 3 * count; i++) {
        n[i] = take_number(in, version);
        pack_number(version, packed, i, n[i]);
    }
    for (size_t i = 0; i < count; i++)
        ascends &= n[3 * i] <= n[3 * i + 1] && n[3 * i + 2] != 0 && (!i || n[3 * i - 2] < n[3 * i]);
    struct routes *routes = routes_new(version, packed, count, none, none);
    REQUIRE(ascends ? routes != NULL : !routes && errno == EINVAL);
    for (size_t more = 0; routes && more < 3 * count + 4; more++) {
        number address = more < 3 * count ? n[more] + more % 3 - 1 : take_number(in, version);
        struct address expected = none;
        if (version == 4)
            address &= 0xffffffff;
        for (size_t i = 0; i < count; i++)
            if (n[3 * i] <= address && address <= n[3 * i + 1])
                expected = address_of(n[3 * i + 2]);
        REQUIRE(address_equal(routes_hop(routes, address_of(address)), expected));
    }
    routes_free(routes);
    free(packed);
}

static void check_peers(struct input *in, int version, size_t count)
{
    static const struct address none;
    number n[MOST];
    int ascends = 1;
    uint8_t *packed = allocate(count * (version == 6 ? 16 : 4));
    for (size_t i = 0; i < count; i++) {
        n[i] = take_number(in, version);
        pack_number(version, packed, i, n[i]);
        ascends &= !i || n[i - 1] < n[i];
    }
    struct routes *routes = routes_new(version, NULL, 0, none, none);
    REQUIRE(routes && routes_admit(routes, address_of(take_number(in, version))));
    REQUIRE(routes_close(routes, version, packed, count) == ascends);
    for (size_t more = 0; ascends && more < 3 * count + 4; more++) {
        number address = more < 3 * count ? n[more / 3] + more % 3 - 1 : take_number(in, version);
        int known = 0;
        for (size_t i = 0; i < count; i++)
            known |= n[i] == address;
        REQUIRE(routes_admit(routes, address_of(address)) == known);
    }
    routes_free(routes);
    free(packed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, size};
    uint8_t how = take8(&in);
    int version = how & 1 ? 6 : 4;
    size_t count = take8(&in) % (MOST + 1);
    if (how & 4)
        check_peers(&in, version, count);
    else
        (how & 2 ? check_ranges : check_prefixes)(&in, version, count);
    return 0;
}
