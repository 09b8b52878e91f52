/* IP packets: checks, TTL, checksums, ICMP errors. The C twin of packet.py and packet6.py.
 *
 * Sources: RFC 791, RFC 792, RFC 1071, RFC 1122 s3.2.2, RFC 1624, RFC 1812 s4.3.2; RFC 8200, RFC 4443.
 * Packets lie at any alignment: fields are loaded and stored through memcpy.
 */
#ifndef FLANNEL_PACKET_H
#define FLANNEL_PACKET_H

#include <arpa/inet.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    IP4_HEADER = 20,
    IP6_HEADER = 40,
    PACKET_MAX = 65535,
    DATAGRAM_MAX = 65535 - 28, /* inside IPv6 it could be 20 more */
    ICMP4_MAX = 576,
    ICMP6_MAX = 1280,
    PROTO_ICMP = 1,
    PROTO_TCP = 6,
    PROTO_UDP = 17,
    PROTO_ICMP6 = 58,
    DF = 0x4000,
    MF_AND_OFFSET = 0x3fff,
    OFFSET = 0x1fff,
};

/* Field offsets. */
enum { IP4_TOS = 1, IP4_TOTAL = 2, IP4_ID = 4, IP4_FRAGMENT = 6, IP4_TTL = 8, IP4_PROTO = 9, IP4_CHECK = 10, IP4_SRC = 12, IP4_DST = 16 };
enum { IP6_PAYLOAD = 4, IP6_NEXT = 6, IP6_HOPS = 7, IP6_SRC = 8, IP6_DST = 24 };
enum { TCP_SEQ = 4, TCP_ACK = 8, TCP_DOFF = 12, TCP_FLAGS = 13, TCP_WINDOW = 14, TCP_CHECK = 16, TCP_URGENT = 18, TCP_HEADER = 20 };
enum { UDP_LENGTH = 4, UDP_CHECK = 6, UDP_HEADER = 8 };
enum { FIN = 0x01, PSH = 0x08, ACK = 0x10, CWR = 0x80 };

static inline uint16_t get16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, 2);
    return ntohs(v);
}

static inline uint32_t get32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return ntohl(v);
}

static inline void put16(uint8_t *p, uint16_t v)
{
    v = htons(v);
    memcpy(p, &v, 2);
}

static inline void put32(uint8_t *p, uint32_t v)
{
    v = htonl(v);
    memcpy(p, &v, 4);
}

/* An address of either family as a number; zero means none. */
struct address {
    uint64_t high, low;
};

static inline bool address_less(struct address a, struct address b)
{
    return a.high != b.high ? a.high < b.high : a.low < b.low;
}

static inline bool address_equal(struct address a, struct address b) { return a.high == b.high && a.low == b.low; }

static inline bool address_set(struct address a) { return a.high || a.low; }

static inline struct address address_at(int version, const uint8_t *p)
{
    struct address a = {0, get32(p)};
    if (version == 6) {
        a.high = (uint64_t)get32(p) << 32 | get32(p + 4);
        a.low = (uint64_t)get32(p + 8) << 32 | get32(p + 12);
    }
    return a;
}

static inline void put_address(int version, uint8_t *p, struct address a)
{
    if (version == 6) {
        put32(p, (uint32_t)(a.high >> 32));
        put32(p + 4, (uint32_t)a.high);
        put32(p + 8, (uint32_t)(a.low >> 32));
        p += 12;
    }
    put32(p, (uint32_t)a.low);
}

static inline int ip_version(const uint8_t *ip) { return ip[0] >> 4; }

static inline size_t ip_header_length(const uint8_t *ip)
{
    return ip_version(ip) == 6 ? IP6_HEADER : (size_t)(ip[0] & 0x0f) * 4;
}

/* The protocol that follows the header: in IPv6 it may be that of an extension header. */
static inline uint8_t ip_protocol(const uint8_t *ip) { return ip[ip_version(ip) == 6 ? IP6_NEXT : IP4_PROTO]; }

static inline uint8_t ip_ttl(const uint8_t *ip) { return ip[ip_version(ip) == 6 ? IP6_HOPS : IP4_TTL]; }

static inline struct address ip_source(const uint8_t *ip)
{
    int version = ip_version(ip);
    return address_at(version, ip + (version == 6 ? IP6_SRC : IP4_SRC));
}

static inline struct address ip_destination(const uint8_t *ip)
{
    int version = ip_version(ip);
    return address_at(version, ip + (version == 6 ? IP6_DST : IP4_DST));
}

/* Whether a router may not fragment it. */
static inline bool ip_unfragmentable(const uint8_t *ip)
{
    return ip_version(ip) == 6 || get16(ip + IP4_FRAGMENT) & DF;
}

/* Sums are kept in memory order, unfolded; a chunk must start at an even offset of what is summed. */
uint64_t sum_bytes(uint64_t sum, const uint8_t *p, size_t length);

static inline uint64_t sum16(uint64_t sum, uint16_t value) { return sum + htons(value); }

static inline uint16_t sum_fold(uint64_t sum)
{
    sum = (sum & 0xffffffff) + (sum >> 32);
    sum = (sum & 0xffffffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)sum;
}

static inline void put_sum(uint8_t *p, uint16_t folded) { memcpy(p, &folded, 2); }

/* The sum of the pseudo-header (RFC 768, RFC 9293, RFC 8200 s8.1): addresses, protocol, length of header and data. */
uint64_t pseudo_sum(const uint8_t *ip, uint8_t protocol, size_t length);

/* Returns the packet's length, 0 if the bytes are no whole IP packet or its header checksum is wrong.
 * Bytes after its end are tolerated, as upstream and the kernel do. */
size_t ip_check(const uint8_t *p, size_t length);

/* Takes one from a TTL that is not 0. */
void ip_decrement_ttl(uint8_t *ip);

/* Writes the length of what follows the header, and its checksum if it has one. */
void ip_finish(uint8_t *ip, size_t length);

/* Whether an ICMP error about a packet that passed ip_check may be sent; ``have`` bytes of it are at hand, its first
 * header among them. */
bool icmp_allowed(const uint8_t *ip, size_t have);

enum icmp_kind { UNREACHABLE, TOO_LARGE, EXCEEDED };

/* Builds an ICMP error of the offender's family in out (ICMP6_MAX bytes) and returns its length. ``have`` bytes of the
 * offender are at hand; ``mtu`` is told if it is TOO_LARGE. */
size_t icmp_error(uint8_t *out, enum icmp_kind kind, uint16_t mtu, const uint8_t *offender, size_t have,
                  struct address source);

#endif
