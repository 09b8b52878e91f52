#include "packet.h"

uint64_t sum_bytes(uint64_t sum, const uint8_t *p, size_t length)
{
    uint64_t part[4] = {0, 0, 0, 0}, word[4];

    while (length >= sizeof word) {
        memcpy(word, p, sizeof word);
        for (int i = 0; i < 4; i++)
            part[i] += (word[i] & 0xffffffff) + (word[i] >> 32);
        p += sizeof word;
        length -= sizeof word;
    }
    memset(word, 0, sizeof word);
    memcpy(word, p, length);
    for (int i = 0; i < 4; i++) {
        part[i] += (word[i] & 0xffffffff) + (word[i] >> 32);
        sum += (part[i] & 0xffffffff) + (part[i] >> 32);
    }
    return sum;
}

uint64_t pseudo_sum(const uint8_t *ip, size_t length)
{
    uint64_t sum = sum_bytes(0, ip + IP4_SRC, 8);
    sum = sum16(sum, ip[IP4_PROTO]);
    return sum16(sum, (uint16_t)length);
}

size_t ip_check(const uint8_t *p, size_t length)
{
    if (length < IP4_HEADER || p[0] >> 4 != 4)
        return 0;
    size_t header = ip_header_length(p), total = get16(p + IP4_TOTAL);
    if (header < IP4_HEADER || total < header || total > length)
        return 0;
    if (sum_fold(sum_bytes(0, p, header)) != 0xffff)
        return 0;
    return total;
}

void ip_decrement_ttl(uint8_t *ip)
{
    /* RFC 1624 eqn. 3: HC' = ~(~HC + ~m + m'). TTL is the upper half of its word. */
    uint32_t old = get16(ip + IP4_TTL), now = old - 0x0100;
    uint32_t sum = (get16(ip + IP4_CHECK) ^ 0xffffu) + (old ^ 0xffffu) + now;
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    put16(ip + IP4_TTL, (uint16_t)now);
    put16(ip + IP4_CHECK, (uint16_t)~sum);
}

void ip_finish(uint8_t *ip)
{
    put16(ip + IP4_CHECK, 0);
    put_sum(ip + IP4_CHECK, (uint16_t)~sum_fold(sum_bytes(0, ip, ip_header_length(ip))));
}

static bool is_host(uint32_t address)
{
    uint32_t top = address >> 24;
    return top != 0 && top != 127 && address >> 28 < 0xe;
}

bool icmp_allowed(const uint8_t *ip)
{
    if (get16(ip + IP4_FRAGMENT) & OFFSET)
        return false;
    if (!is_host(get32(ip + IP4_SRC)) || get32(ip + IP4_DST) >> 28 >= 0xe)
        return false;
    if (ip[IP4_PROTO] != PROTO_ICMP)
        return true;
    size_t header = ip_header_length(ip);
    if (get16(ip + IP4_TOTAL) == header)
        return false;
    uint8_t type = ip[header];
    return type != 3 && type != 4 && type != 5 && type != 11 && type != 12;
}

size_t icmp_error(uint8_t *out, uint8_t type, uint8_t code, uint16_t mtu, const uint8_t *offender, size_t have,
                  uint32_t source)
{
    size_t quote = get16(offender + IP4_TOTAL), room = ICMP_MAX - IP4_HEADER - 8;
    if (quote > have)
        quote = have;
    if (quote > room)
        quote = room;
    uint8_t *icmp = out + IP4_HEADER;
    memset(out, 0, IP4_HEADER + 8);
    icmp[0] = type;
    icmp[1] = code;
    put16(icmp + 6, mtu);
    memcpy(icmp + 8, offender, quote);
    put_sum(icmp + 2, (uint16_t)~sum_fold(sum_bytes(0, icmp, 8 + quote)));

    out[0] = 0x45;
    out[IP4_TOS] = 0xc0; /* internetwork control, RFC 1812 s4.3.2.5 */
    put16(out + IP4_TOTAL, (uint16_t)(IP4_HEADER + 8 + quote));
    out[IP4_TTL] = 64;
    out[IP4_PROTO] = PROTO_ICMP;
    put32(out + IP4_SRC, source);
    memcpy(out + IP4_DST, offender + IP4_SRC, 4);
    ip_finish(out);
    return IP4_HEADER + 8 + quote;
}
