#include "segment.h"

/* Length of the headers before TCP or UDP, 0 if they are not to be cut: IPv6 may have more than one. */
static size_t headers_before(const uint8_t *vnet, const uint8_t *packet)
{
    if (ip_version(packet) == 6) {
        size_t start = vnet16(vnet, VNET_CSUM_START);
        return start < IP6_HEADER || start > IP_HEADERS_MAX ? 0 : start;
    }
    return get16(packet + IP4_FRAGMENT) & MF_AND_OFFSET ? 0 : ip_header_length(packet);
}

bool cut_begin(struct cut *cut, const uint8_t *vnet, const uint8_t *packet, size_t total)
{
    bool six = ip_version(packet) == 6;
    size_t ip = headers_before(vnet, packet), l4;
    uint8_t type = vnet[VNET_TYPE] & (uint8_t)~VNET_ECN;
    bool told = ip == ip_header_length(packet); /* else an extension header tells */

    if (!ip)
        return false;
    if (type == (six ? VNET_TCPV6 : VNET_TCPV4) && total >= ip + TCP_HEADER) {
        cut->protocol = PROTO_TCP;
        l4 = (size_t)(packet[ip + TCP_DOFF] >> 4) * 4;
        if (l4 < TCP_HEADER)
            return false;
        cut->seq = get32(packet + ip + TCP_SEQ);
    } else if (type == VNET_UDP_L4) {
        cut->protocol = PROTO_UDP;
        l4 = UDP_HEADER;
    } else {
        return false;
    }
    cut->size = vnet16(vnet, VNET_SIZE);
    if ((told && ip_protocol(packet) != cut->protocol) || total <= ip + l4 || cut->size == 0)
        return false;

    if (!six) {
        uint8_t header[60];
        memcpy(header, packet, ip);
        put16(header + IP4_TOTAL, 0);
        put16(header + IP4_ID, 0);
        put16(header + IP4_CHECK, 0);
        cut->ip_sum = sum_bytes(0, header, ip);
        cut->id = get16(packet + IP4_ID);
    }
    cut->l4_sum = pseudo_sum(packet, cut->protocol, 0);
    cut->packet = packet;
    cut->ip = ip;
    cut->l4 = l4;
    cut->payload = total - ip - l4;
    cut->at = 0;
    return true;
}

static void ip_header(struct cut *cut, uint8_t *head, size_t l4_total)
{
    if (ip_version(cut->packet) == 6) {
        put16(head + IP6_PAYLOAD, (uint16_t)(cut->ip - IP6_HEADER + l4_total));
        return;
    }
    uint16_t total = (uint16_t)(cut->ip + l4_total);
    put16(head + IP4_TOTAL, total);
    put16(head + IP4_ID, cut->id);
    put_sum(head + IP4_CHECK, (uint16_t)~sum_fold(sum16(sum16(cut->ip_sum, total), cut->id)));
    cut->id++;
}

static void tcp_header(const struct cut *cut, uint8_t *tcp, bool first, bool last)
{
    put32(tcp + TCP_SEQ, cut->seq + (uint32_t)cut->at);
    if (!last)
        tcp[TCP_FLAGS] &= (uint8_t)~(FIN | PSH);
    if (!first)
        tcp[TCP_FLAGS] &= (uint8_t)~CWR;
}

bool cut_next(struct cut *cut, uint8_t *head, const uint8_t **body, size_t *body_length)
{
    if (cut->at >= cut->payload)
        return false;
    size_t left = cut->payload - cut->at, length = left < cut->size ? left : cut->size;
    uint8_t *l4 = head + cut->ip;
    size_t l4_total = cut->l4 + length;

    *body = cut->packet + cut->ip + cut->l4 + cut->at;
    *body_length = length;
    memcpy(head, cut->packet, cut->ip + cut->l4);
    ip_header(cut, head, l4_total);

    bool udp = cut->protocol == PROTO_UDP;
    size_t check = udp ? UDP_CHECK : TCP_CHECK;
    if (udp)
        put16(l4 + UDP_LENGTH, (uint16_t)l4_total);
    else
        tcp_header(cut, l4, cut->at == 0, length == left);
    put16(l4 + check, 0);
    uint64_t sum = sum16(cut->l4_sum, (uint16_t)l4_total);
    sum = sum_bytes(sum, l4, cut->l4);
    uint16_t folded = (uint16_t)~sum_fold(sum_bytes(sum, *body, length));
    put_sum(l4 + check, udp && folded == 0 ? 0xffff : folded);

    cut->at += length;
    return true;
}

bool finish_checksum(const uint8_t *vnet, uint8_t *packet, size_t total)
{
    size_t start = vnet16(vnet, VNET_CSUM_START), at = start + vnet16(vnet, VNET_CSUM_OFFSET);
    if (start < ip_header_length(packet) || start >= total || at + 2 > total)
        return false;
    /* The field holds the folded sum of the pseudo-header, so that it is part of the sum. */
    uint16_t folded = (uint16_t)~sum_fold(sum_bytes(0, packet + start, total - start));
    bool udp = at - start == UDP_CHECK && (ip_version(packet) == 6 || packet[IP4_PROTO] == PROTO_UDP);
    put_sum(packet + at, udp && folded == 0 ? 0xffff : folded);
    return true;
}
