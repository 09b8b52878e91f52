#include "packet.h"

uint64_t sum_bytes(uint64_t sum, const uint8_t *p, size_t length)
{
    uint32_t word;
    size_t at;

    /* As plain as this it becomes vector code on every processor. */
    for (at = 0; at + sizeof word <= length; at += sizeof word) {
        memcpy(&word, p + at, sizeof word);
        sum += word;
    }
    word = 0;
    memcpy(&word, p + at, length - at);
    return sum + word;
}

uint64_t pseudo_sum(const uint8_t *ip, uint8_t protocol, size_t length)
{
    uint64_t sum = ip_version(ip) == 6 ? sum_bytes(0, ip + IP6_SRC, 32) : sum_bytes(0, ip + IP4_SRC, 8);
    sum = sum16(sum, protocol);
    return sum16(sum, (uint16_t)length);
}

static size_t ip6_check(const uint8_t *p, size_t length)
{
    if (length < IP6_HEADER)
        return 0;
    size_t total = IP6_HEADER + (size_t)get16(p + IP6_PAYLOAD);
    return total > length ? 0 : total;
}

size_t ip_check(const uint8_t *p, size_t length)
{
    if (length && ip_version(p) == 6)
        return ip6_check(p, length);
    if (length < IP4_HEADER || ip_version(p) != 4)
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
    if (ip_version(ip) == 6) {
        ip[IP6_HOPS]--;
        return;
    }
    /* RFC 1624 eqn. 3: HC' = ~(~HC + ~m + m'). TTL is the upper half of its word. */
    uint32_t old = get16(ip + IP4_TTL), now = old - 0x0100;
    uint32_t sum = (get16(ip + IP4_CHECK) ^ 0xffffu) + (old ^ 0xffffu) + now;
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    put16(ip + IP4_TTL, (uint16_t)now);
    put16(ip + IP4_CHECK, (uint16_t)~sum);
}

void ip_finish(uint8_t *ip, size_t length)
{
    if (ip_version(ip) == 6) {
        put16(ip + IP6_PAYLOAD, (uint16_t)length);
        return;
    }
    size_t header = ip_header_length(ip);
    put16(ip + IP4_TOTAL, (uint16_t)(header + length));
    put16(ip + IP4_CHECK, 0);
    put_sum(ip + IP4_CHECK, (uint16_t)~sum_fold(sum_bytes(0, ip, header)));
}

static bool is_host(uint32_t address)
{
    uint32_t top = address >> 24;
    return top != 0 && top != 127 && address >> 28 < 0xe;
}

static bool icmp4_allowed(const uint8_t *ip, size_t have)
{
    if (get16(ip + IP4_FRAGMENT) & OFFSET)
        return false;
    if (!is_host(get32(ip + IP4_SRC)) || get32(ip + IP4_DST) >> 28 >= 0xe)
        return false;
    if (ip[IP4_PROTO] != PROTO_ICMP)
        return true;
    size_t header = ip_header_length(ip);
    if (get16(ip + IP4_TOTAL) == header || have <= header)
        return false;
    uint8_t type = ip[header];
    return type != 3 && type != 4 && type != 5 && type != 11 && type != 12;
}

/* Follows extension headers (RFC 8200 s4); returns the offset of what they lead to and its protocol, 0 if that
 * does not lie before ``end`` or lies in its first fragment. */
static size_t ip6_upper(const uint8_t *ip, size_t end, uint8_t *protocol)
{
    size_t at = IP6_HEADER;
    *protocol = ip[IP6_NEXT];
    while (*protocol == 0 || *protocol == 43 || *protocol == 44 || *protocol == 60) {
        if (at + 8 > end || (*protocol == 44 && get16(ip + at + 2) & 0xfff8))
            return 0;
        size_t length = *protocol == 44 ? 8 : 8 * ((size_t)ip[at + 1] + 1);
        *protocol = ip[at];
        at += length;
    }
    return at > end ? 0 : at;
}

/* RFC 4443 s2.4. */
static bool icmp6_allowed(const uint8_t *ip, size_t have)
{
    struct address source = ip_source(ip);
    size_t total = IP6_HEADER + (size_t)get16(ip + IP6_PAYLOAD), end = have < total ? have : total;
    uint8_t protocol;
    if (ip[IP6_SRC] == 0xff || ip[IP6_DST] == 0xff || (source.high == 0 && source.low <= 1))
        return false;
    size_t upper = ip6_upper(ip, end, &protocol);
    if (!upper)
        return false;
    if (protocol != PROTO_ICMP6)
        return true;
    return upper < end && ip[upper] >= 128 && ip[upper] != 137;
}

bool icmp_allowed(const uint8_t *ip, size_t have)
{
    return ip_version(ip) == 6 ? icmp6_allowed(ip, have) : icmp4_allowed(ip, have);
}

size_t icmp_error(uint8_t *out, enum icmp_kind kind, uint16_t mtu, const uint8_t *offender, size_t have,
                  struct address source)
{
    static const uint8_t types[2][3][2] = {{{3, 0}, {3, 4}, {11, 0}}, {{1, 0}, {2, 0}, {3, 0}}};
    bool six = ip_version(offender) == 6;
    size_t header = six ? IP6_HEADER : IP4_HEADER, room = (six ? ICMP6_MAX : ICMP4_MAX) - header - 8;
    size_t quote = six ? IP6_HEADER + (size_t)get16(offender + IP6_PAYLOAD) : get16(offender + IP4_TOTAL);
    if (quote > have)
        quote = have;
    if (quote > room)
        quote = room;
    uint8_t *icmp = out + header;
    memset(out, 0, header + 8);
    icmp[0] = types[six][kind][0];
    icmp[1] = types[six][kind][1];
    put16(icmp + 6, kind == TOO_LARGE ? mtu : 0);
    memcpy(icmp + 8, offender, quote);

    if (six) {
        out[0] = 0x60;
        out[IP6_NEXT] = PROTO_ICMP6;
        out[IP6_HOPS] = 64;
        put_address(6, out + IP6_SRC, source);
        memcpy(out + IP6_DST, offender + IP6_SRC, 16);
    } else {
        out[0] = 0x45;
        out[IP4_TOS] = 0xc0; /* internetwork control, RFC 1812 s4.3.2.5 */
        out[IP4_TTL] = 64;
        out[IP4_PROTO] = PROTO_ICMP;
        put_address(4, out + IP4_SRC, source);
        memcpy(out + IP4_DST, offender + IP4_SRC, 4);
    }
    ip_finish(out, 8 + quote);
    uint64_t sum = six ? pseudo_sum(out, PROTO_ICMP6, 8 + quote) : 0;
    put_sum(icmp + 2, (uint16_t)~sum_fold(sum_bytes(sum, icmp, 8 + quote)));
    return header + 8 + quote;
}
