/* Input: what the kernel takes merged, then packets: flow, what is special about it, length, and a byte to change. */
#include "coalesce.h"

#include "fuzz.h"

enum { MOST = 280, FLOWS_MADE = 20, ROOM = 65535 };

/* What is special about a packet. */
enum { CHANGED = 1, DAMAGED = 2, DIVISIBLE = 4, PUSHED = 8, OPTIONS = 16, JUMPS = 32, FRAGMENT = 64, EXTENDED = 128 };

struct made {
    uint8_t *bytes;
    size_t total;
    int arrived;      /* how many packets were written before it; -1: it was not */
};

struct state {
    struct made made[MOST];
    size_t count;
    int written;
    bool tcp, udp;
    uint32_t seq[FLOWS_MADE];
    uint16_t id[FLOWS_MADE];
};

static size_t put_headers(uint8_t *p, unsigned flow, uint8_t special, size_t length, struct state *s)
{
    bool udp = flow & 2, extended = special & EXTENDED;
    size_t before = flow & 1 ? (extended ? 48 : 40) : extended ? 24 : 20;
    size_t l4 = udp ? UDP_HEADER : special & OPTIONS ? 32 : TCP_HEADER, total = before + l4 + length;
    uint8_t protocol = udp ? PROTO_UDP : PROTO_TCP, *t = p + before;

    memset(p, 0, before + l4);
    if (flow & 1) {
        p[0] = 0x60;
        put16(p + IP6_PAYLOAD, (uint16_t)(total - 40));
        p[IP6_NEXT] = extended ? 60 : protocol;
        p[40] = extended ? protocol : 0;
        p[IP6_HOPS] = 64;
        p[IP6_SRC] = p[IP6_DST] = 0xfd;
        p[IP6_DST + 15] = 1;
    } else {
        p[0] = (uint8_t)(0x40 | before / 4);
        put16(p + IP4_ID, s->id[flow]++);
        p[IP4_TTL] = 64;
        p[IP4_PROTO] = protocol;
        p[IP4_SRC] = p[IP4_DST] = 10;
        p[IP4_DST + 3] = 1;
        put16(p + IP4_FRAGMENT, special & FRAGMENT ? 0x2000 : special & DIVISIBLE ? 0 : DF);
        if (extended)
            memset(p + 20, 1, 4); /* no operation */
    }
    put16(t, (uint16_t)(1000 + flow / 4));
    put16(t + 2, 80);
    if (udp) {
        put16(t + UDP_LENGTH, (uint16_t)(l4 + length));
        return before;
    }
    put32(t + TCP_SEQ, s->seq[flow]);
    s->seq[flow] += (uint32_t)length;
    t[TCP_DOFF] = (uint8_t)(l4 / 4 << 4);
    t[TCP_FLAGS] = ACK | (special & PUSHED ? PSH : 0);
    return before;
}

static void put_l4_checksum(uint8_t *p, size_t total, size_t before, bool udp)
{
    uint8_t *field = p + before + (udp ? UDP_CHECK : TCP_CHECK);
    put16(field, 0);
    uint16_t value = (uint16_t)~l4_added(p, total, before, udp ? PROTO_UDP : PROTO_TCP);
    put16(field, udp && !value ? 0xffff : value);
}

static void make(struct state *s, struct input *in, uint8_t *p)
{
    static const uint16_t lengths[] = {1400, 100, 1, 0, 1448, 6000, 536, 64};
    unsigned flow = take8(in) % FLOWS_MADE;
    uint8_t special = take8(in), pick = take8(in);
    size_t length = pick < 0x80 ? lengths[pick % 8] : take8(in);
    if (special & JUMPS)
        s->seq[flow] = take32(in);
    size_t before = put_headers(p, flow, special, length, s), l4 = flow & 2 ? 8 : special & OPTIONS ? 32 : 20;
    size_t total = before + l4 + length;
    for (size_t i = before + l4; i < total; i++)
        p[i] = (uint8_t)(i * 7 + s->count * 31);
    size_t place = 0;
    uint8_t change = 0;
    if (special & CHANGED) {
        place = take16(in) % total;
        change = take8(in);
    }
    p[place] ^= special & DAMAGED ? 0 : change;
    put_l4_checksum(p, total, before, flow & 2);
    if (!(special & DAMAGED))
        repair(p, total);
    else
        repair(p, total), p[place] ^= change;

    uint8_t *exact = copied(p, total);
    size_t found = ip_check(exact, total);
    if (found)
        s->made[s->count++] = (struct made){exact, found, -1};
    else
        free(exact);
}

/* Whether these bytes are that packet; an id that says nothing may be another one (RFC 6864), and with it the sum. */
static bool same(const uint8_t *a, const struct made *b, size_t total, bool merged)
{
    if (b->total != total)
        return false;
    if (!merged || ip_version(a) == 6 || !(get16(a + IP4_FRAGMENT) & DF))
        return !memcmp(a, b->bytes, total);
    return !memcmp(a, b->bytes, IP4_ID) && !memcmp(a + IP4_FRAGMENT, b->bytes + IP4_FRAGMENT, 4) &&
           !memcmp(a + IP4_SRC, b->bytes + IP4_SRC, total - IP4_SRC);
}

static void arrived(struct state *s, const uint8_t *p, size_t total, bool merged)
{
    for (size_t i = 0; i < s->count; i++)
        if (s->made[i].arrived < 0 && same(p, &s->made[i], total, merged)) {
            s->made[i].arrived = s->written++;
            return;
        }
    REQUIRE(!"a packet that was never sent");
}

static void take_apart(struct state *s, const uint8_t *vnet, const uint8_t *packet, size_t total, unsigned packets)
{
    struct cut cut;
    const uint8_t *body;
    size_t length, before = ip_header_length(packet);
    bool udp = vnet[VNET_TYPE] == VNET_UDP_L4;
    uint8_t protocol = udp ? PROTO_UDP : PROTO_TCP, tail[4] = {0, protocol};
    int six = ip_version(packet) == 6;

    REQUIRE(udp ? s->udp : s->tcp && vnet[VNET_TYPE] == (six ? VNET_TCPV6 : VNET_TCPV4));
    REQUIRE(vnet[VNET_FLAGS] == VNET_NEEDS_CSUM && packets > 1 && (!udp || packets <= 64));
    REQUIRE(ip_protocol(packet) == protocol && vnet16(vnet, VNET_CSUM_START) == before);
    REQUIRE(vnet16(vnet, VNET_CSUM_OFFSET) == (udp ? UDP_CHECK : TCP_CHECK));
    REQUIRE(!udp || get16(packet + before + UDP_LENGTH) == total - before);
    /* The field holds the sum of the pseudo-header (Documentation/networking/checksum-offloads.rst). */
    put16(tail + 2, (uint16_t)(total - before));
    uint32_t pseudo = added(six ? added(0, packet + 8, 32) : added(0, packet + 12, 8), tail, 4);
    REQUIRE(get16(packet + before + vnet16(vnet, VNET_CSUM_OFFSET)) == pseudo);

    REQUIRE(cut_begin(&cut, vnet, packet, total));
    REQUIRE(vnet16(vnet, VNET_HEADER) == cut.ip + cut.l4);
    for (uint8_t *one = allocate(ROOM);; packets--) {
        if (!cut_next(&cut, one, &body, &length)) {
            free(one);
            break;
        }
        memcpy(one + cut.ip + cut.l4, body, length);
        arrived(s, one, cut.ip + cut.l4 + length, true);
    }
    REQUIRE(packets == 0);
}

static void note(void *context, const struct iovec *parts, int count, unsigned packets)
{
    struct state *s = context;
    size_t total = 0;
    for (int i = 0; i < count; i++)
        total += parts[i].iov_len;
    REQUIRE(count >= 2 && total > VNET && total <= VNET + PACKET_MAX);
    uint8_t *whole = allocate(total), *to = whole;
    for (int i = 0; i < count; i++) {
        memcpy(to, parts[i].iov_base, parts[i].iov_len);
        to += parts[i].iov_len;
    }
    REQUIRE(is_packet(whole + VNET, total - VNET));
    if (whole[VNET_TYPE] != VNET_NONE) {
        take_apart(s, whole, whole + VNET, total - VNET, packets);
    } else {
        static const uint8_t nothing[VNET];
        REQUIRE(!memcmp(whole, nothing, VNET) && packets == 1);
        arrived(s, whole + VNET, total - VNET, false);
    }
    free(whole);
}

static bool tells_ports(const struct made *m)
{
    const uint8_t *p = m->bytes;
    size_t before = ip_header_length(p);
    if (ip_version(p) == 4 && (before != 20 || get16(p + IP4_FRAGMENT) & 0x3fff))
        return false;
    return (ip_protocol(p) == PROTO_TCP && m->total >= before + 20) ||
           (ip_protocol(p) == PROTO_UDP && m->total >= before + 8);
}

/* Whether two packets may be of one flow: what does not tell its ports may be of any between the same ends. */
static bool together(const struct made *a, const struct made *b)
{
    int six = ip_version(a->bytes) == 6, ends = six ? IP6_SRC : IP4_SRC;
    uint8_t one = ip_protocol(a->bytes), other = ip_protocol(b->bytes);
    if (ip_version(a->bytes) != ip_version(b->bytes) || memcmp(a->bytes + ends, b->bytes + ends, six ? 32 : 8))
        return false;
    if (tells_ports(a) && tells_ports(b))
        return one == other && !memcmp(a->bytes + (six ? 40 : 20), b->bytes + (six ? 40 : 20), 4);
    return one == other || (one != PROTO_ICMP && one != PROTO_ICMP6 && other != PROTO_ICMP && other != PROTO_ICMP6);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, size};
    struct state *s = allocate(sizeof *s);
    struct coalescer *c = allocate(sizeof *c);
    uint8_t how = take8(&in), *room = allocate(ROOM);
    s->tcp = how & 1;
    s->udp = how & 2;
    for (int i = 0; i < FLOWS_MADE; i++)
        s->seq[i] = 0xffff0000 + 10000 * (uint32_t)i;
    coalesce_init(c, s->tcp, s->udp, note, s);
    while (in.left && s->count < MOST) {
        size_t before = s->count;
        make(s, &in, room);
        if (s->count > before)
            coalesce(c, s->made[before].bytes, s->made[before].total);
    }
    coalesce_flush(c);

    REQUIRE((size_t)s->written == s->count);
    for (size_t i = 0; i < s->count; i++)
        for (size_t j = i + 1; j < s->count; j++)
            REQUIRE(!together(&s->made[i], &s->made[j]) || s->made[i].arrived < s->made[j].arrived);
    for (size_t i = 0; i < s->count; i++)
        free(s->made[i].bytes);
    free(room);
    free(c);
    free(s);
    return 0;
}
