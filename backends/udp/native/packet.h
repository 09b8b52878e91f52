/* IPv4 packets: checks, TTL, checksums, ICMP errors. The C twin of packet.py.
 *
 * Sources: RFC 791, RFC 792, RFC 1071, RFC 1122 s3.2.2, RFC 1624, RFC 1812 s4.3.2.
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
    PACKET_MAX = 65535,
    DATAGRAM_MAX = 65535 - 28,
    ICMP_MAX = 576,
    PROTO_ICMP = 1,
    PROTO_TCP = 6,
    PROTO_UDP = 17,
    DF = 0x4000,
    MF_AND_OFFSET = 0x3fff,
    OFFSET = 0x1fff,
};

/* Field offsets. */
enum { IP4_TOS = 1, IP4_TOTAL = 2, IP4_ID = 4, IP4_FRAGMENT = 6, IP4_TTL = 8, IP4_PROTO = 9, IP4_CHECK = 10, IP4_SRC = 12, IP4_DST = 16 };
enum { TCP_SEQ = 4, TCP_ACK = 8, TCP_DOFF = 12, TCP_FLAGS = 13, TCP_WINDOW = 14, TCP_CHECK = 16, TCP_HEADER = 20 };
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

static inline size_t ip_header_length(const uint8_t *ip) { return (size_t)(ip[0] & 0x0f) * 4; }

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

/* The sum of the pseudo-header (RFC 768, RFC 9293): addresses, protocol, length of header and data. */
uint64_t pseudo_sum(const uint8_t *ip, size_t length);

/* Returns the packet's length, 0 if the bytes are no whole IPv4 packet or its header checksum is wrong.
 * Bytes after its end are tolerated, as upstream and the kernel do. */
size_t ip_check(const uint8_t *p, size_t length);

/* Takes one from a TTL that is not 0. */
void ip_decrement_ttl(uint8_t *ip);

/* Writes the header checksum anew. */
void ip_finish(uint8_t *ip);

/* Whether an ICMP error about a packet that passed ip_check may be sent. */
bool icmp_allowed(const uint8_t *ip);

/* Builds an ICMP error in out (ICMP_MAX bytes) and returns its length. ``have`` bytes of the offender are at hand. */
size_t icmp_error(uint8_t *out, uint8_t type, uint8_t code, uint16_t mtu, const uint8_t *offender, size_t have,
                  uint32_t source);

#endif
