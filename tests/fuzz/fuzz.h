/* What the fuzz targets share: bytes of the input one by one, and IP told again in the plainest way, as the measure of
 * what the pump makes. Nothing here uses the pump's own sums. */
#ifndef FLANNEL_FUZZ_H
#define FLANNEL_FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "packet.h"

#define REQUIRE(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct input {
    const uint8_t *at;
    size_t left;
};

/* Beyond the end there are zeros. */
static inline uint8_t take8(struct input *in)
{
    if (!in->left)
        return 0;
    in->left--;
    return *in->at++;
}

static inline uint16_t take16(struct input *in)
{
    uint16_t high = take8(in);
    return (uint16_t)(high << 8 | take8(in));
}

static inline uint32_t take32(struct input *in)
{
    uint32_t high = take16(in);
    return high << 16 | take16(in);
}

static inline void *allocate(size_t size)
{
    void *p = calloc(1, size ? size : 1);
    REQUIRE(p);
    return p;
}

/* A copy of exactly that size: every step beyond it is seen. */
static inline uint8_t *copied(const uint8_t *from, size_t size)
{
    uint8_t *p = allocate(size);
    if (size)
        memcpy(p, from, size);
    return p;
}

/* RFC 1071: numbers of 16 bits added with end-around carry; an odd byte is the upper half of one. */
static inline uint32_t added(uint32_t sum, const uint8_t *p, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        sum += i % 2 ? p[i] : (uint32_t)p[i] << 8;
        sum = (sum & 0xffff) + (sum >> 16);
    }
    return sum;
}

/* The sum over pseudo-header and everything from ``before`` on: 0xffff for a packet whose checksum is right. */
static inline uint32_t l4_added(const uint8_t *ip, size_t total, size_t before, uint8_t protocol)
{
    uint8_t tail[4] = {0, protocol, (uint8_t)((total - before) >> 8), (uint8_t)(total - before)};
    uint32_t sum = ip[0] >> 4 == 6 ? added(0, ip + 8, 32) : added(0, ip + 12, 8);
    return added(added(sum, tail, 4), ip + before, total - before);
}

/* Whether exactly these bytes are one packet with a right header checksum. */
static inline int is_packet(const uint8_t *p, size_t length)
{
    if (length >= 40 && p[0] >> 4 == 6)
        return 40 + (size_t)(p[4] << 8 | p[5]) == length;
    size_t header = length ? (size_t)(p[0] & 15) * 4 : 0;
    return length >= 20 && p[0] >> 4 == 4 && header >= 20 && header <= length &&
           (size_t)(p[2] << 8 | p[3]) == length && added(0, p, header) == 0xffff;
}

/* Writes the length of what is there, and the checksum of the header, where there is room for them: a checksum is
 * nothing that a fuzzer finds by itself. */
static inline void repair(uint8_t *p, size_t length)
{
    if (length >= 40 && p[0] >> 4 == 6) {
        size_t payload = length - 40 > 0xffff ? 0xffff : length - 40;
        p[4] = (uint8_t)(payload >> 8);
        p[5] = (uint8_t)payload;
    } else if (length >= 20) {
        size_t header = (size_t)(p[0] & 15) * 4, total = length > 0xffff ? 0xffff : length;
        if (header < 20 || header > length)
            p[0] = 0x45, header = 20;
        p[0] = (uint8_t)(0x40 | (p[0] & 15));
        p[2] = (uint8_t)(total >> 8);
        p[3] = (uint8_t)total;
        p[10] = p[11] = 0;
        uint32_t sum = added(0, p, header) ^ 0xffff;
        p[10] = (uint8_t)(sum >> 8);
        p[11] = (uint8_t)sum;
    }
}

#endif
