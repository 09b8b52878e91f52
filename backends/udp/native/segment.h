/* Cuts a TCP or UDP super-packet into packets that fit the MTU (what a NIC does with TSO and USO),
 * and finishes the checksum of an ordinary packet. */
#ifndef FLANNEL_SEGMENT_H
#define FLANNEL_SEGMENT_H

#include "packet.h"

/* struct virtio_net_hdr (linux/virtio_net.h): native order, precedes every packet of the TUN. */
enum { VNET = 10, VNET_FLAGS = 0, VNET_TYPE = 1, VNET_HEADER = 2, VNET_SIZE = 4, VNET_CSUM_START = 6, VNET_CSUM_OFFSET = 8 };
enum { VNET_NEEDS_CSUM = 1, VNET_NONE = 0, VNET_TCPV4 = 1, VNET_TCPV6 = 4, VNET_UDP_L4 = 5, VNET_ECN = 0x80 };

static inline uint16_t vnet16(const uint8_t *vnet, int at)
{
    uint16_t v;
    memcpy(&v, vnet + at, 2);
    return v;
}

static inline void vnet_put16(uint8_t *vnet, int at, uint16_t v) { memcpy(vnet + at, &v, 2); }

enum { IP_HEADERS_MAX = 60, HEADERS_MAX = IP_HEADERS_MAX + 60 }; /* IP with 40 bytes of options or 20 of extensions, TCP with 40 */

struct cut {
    const uint8_t *packet;
    size_t ip, l4;           /* lengths of the headers */
    size_t size;             /* payload bytes of every segment but the last */
    size_t payload, at;      /* bytes in all, and how many were handed out */
    uint8_t protocol;
    uint64_t ip_sum;         /* of the header without length, id and checksum; IPv6 has none */
    uint64_t l4_sum;         /* of addresses and protocol */
    uint16_t id;
    uint32_t seq;
};

/* Prepares to cut a packet that passed ip_check; total is its length. Returns false for what is no sound super-packet. */
bool cut_begin(struct cut *cut, const uint8_t *vnet, const uint8_t *packet, size_t total);

/* Writes the headers of the next segment to head (HEADERS_MAX) and tells its body; false: there is none. */
bool cut_next(struct cut *cut, uint8_t *head, const uint8_t **body, size_t *body_length);

/* Completes the checksum that the kernel left unfinished; false: its place is not in the payload. */
bool finish_checksum(const uint8_t *vnet, uint8_t *packet, size_t total);

#endif
