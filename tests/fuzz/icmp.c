/* Input: whether to repair the packet, how much of it is at hand, kind, MTU, address of the router, packet. */
#include "fuzz.h"

/* RFC 1122 s3.2.2, RFC 1812 s4.3.2.7: whether there is somebody to answer, and something to answer. */
static int may_answer4(const uint8_t *p, size_t have, size_t total)
{
    size_t header = (size_t)(p[0] & 15) * 4;
    uint8_t from = p[12];
    if ((p[6] & 0x1f) || p[7])
        return 0; /* a later fragment */
    if (from == 0 || from == 127 || from >= 224 || p[16] >= 224)
        return 0;
    if (p[9] != 1)
        return 1;
    if (header == total || header >= have)
        return 0;
    return !strchr("\3\4\5\13\14", p[header]) || p[header] == 0;
}

/* RFC 4443 s2.4 (e). */
static int may_answer6(const uint8_t *p, size_t have, size_t total)
{
    static const uint8_t nobody[16];
    uint8_t next = p[6];
    size_t at = 40, end = have < total ? have : total;
    if (p[8] == 0xff || p[24] == 0xff || !memcmp(p + 8, nobody, 16) || (!memcmp(p + 8, nobody, 15) && p[23] == 1))
        return 0;
    for (;;) {
        size_t length;
        if (next == 58)
            return at < end && p[at] >= 128 && p[at] != 137;
        if (next != 0 && next != 43 && next != 44 && next != 60)
            return at <= end;
        if (at + 8 > end)
            return 0; /* what it leads to cannot be told */
        if (next == 44 && ((p[at + 2] << 8 | p[at + 3]) & 0xfff8))
            return 0; /* a later fragment */
        length = next == 44 ? 8 : 8 + 8 * (size_t)p[at + 1];
        next = p[at];
        at += length;
    }
}

static void check_error(const uint8_t *out, size_t length, const uint8_t *offender, size_t have, size_t total,
                        enum icmp_kind kind, uint16_t mtu, struct address router)
{
    static const uint8_t says[2][3][2] = {{{3, 0}, {3, 4}, {11, 0}}, {{1, 0}, {2, 0}, {3, 0}}};
    int six = offender[0] >> 4 == 6;
    size_t header = six ? 40 : 20, most = six ? 1280 : 576, quote = length - header - 8;
    const uint8_t *icmp = out + header;

    REQUIRE(length >= header + 8 && length <= most);
    REQUIRE(is_packet(out, length) && ip_header_length(out) == header);
    REQUIRE(ip_protocol(out) == (six ? 58 : 1) && ip_ttl(out) >= 64);
    REQUIRE(six || !(out[6] & 0x3f || out[7]));
    REQUIRE(address_equal(ip_source(out), router));
    REQUIRE(!memcmp(out + header - (six ? 16 : 4), offender + (six ? 8 : 12), six ? 16 : 4));
    REQUIRE(icmp[0] == says[six][kind][0] && icmp[1] == says[six][kind][1]);
    REQUIRE((six ? l4_added(out, length, header, 58) : added(0, icmp, length - header)) == 0xffff);
    REQUIRE(get16(icmp + 4) == 0 && get16(icmp + 6) == (kind == TOO_LARGE ? mtu : 0));
    /* As much as there is and fits, unchanged. */
    if (have > total)
        have = total;
    REQUIRE(quote == (have < most - header - 8 ? have : most - header - 8));
    REQUIRE(!memcmp(icmp + 8, offender, quote));
    /* Nobody answers the answer. */
    uint8_t *answer = copied(out, length);
    REQUIRE(ip_check(answer, length) == length && !icmp_allowed(answer, length));
    free(answer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, size};
    uint8_t how = take8(&in), address[16] = {0};
    size_t have = take16(&in);
    enum icmp_kind kind = take8(&in) % 3;
    uint16_t mtu = take16(&in);
    for (int i = 0; i < 16; i++)
        address[i] = take8(&in);
    /* Of a host, as the pump's own are. */
    address[0] = 10;
    if (in.left > PACKET_MAX)
        return 0;
    uint8_t *packet = copied(in.at, in.left);
    if (how & 1)
        repair(packet, in.left);
    size_t total = ip_check(packet, in.left);
    if (total) {
        int six = packet[0] >> 4 == 6;
        if (!(how & 2) || have > total)
            have = total;
        if (have < ip_header_length(packet))
            have = ip_header_length(packet);
        uint8_t *offender = copied(packet, have);
        int allowed = icmp_allowed(offender, have);
        REQUIRE(allowed == (six ? may_answer6 : may_answer4)(offender, have, total));
        if (allowed) {
            struct address router = address_at(six ? 6 : 4, address);
            uint8_t *out = allocate(ICMP6_MAX);
            size_t length = icmp_error(out, kind, mtu, offender, have, router);
            check_error(out, length, offender, have, total, kind, mtu, router);
            free(out);
        }
        if (ip_ttl(packet)) {
            uint8_t ttl = ip_ttl(packet);
            ip_decrement_ttl(packet);
            REQUIRE(ip_ttl(packet) == ttl - 1 && is_packet(packet, total));
        }
        free(offender);
    }
    free(packet);
    return 0;
}
