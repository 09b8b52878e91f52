#include "coalesce.h"

static const uint8_t no_vnet[VNET];

void coalesce_init(struct coalescer *c, bool tcp, bool udp,
                   void (*write)(void *, const struct iovec *, int, unsigned), void *context)
{
    memset(c, 0, sizeof *c);
    c->tcp = tcp;
    c->udp = udp;
    c->write = write;
    c->context = context;
}

static void write_single(struct coalescer *c, const uint8_t *packet, size_t total)
{
    struct iovec parts[2] = {{(void *)no_vnet, VNET}, {(void *)packet, total}};
    c->write(c->context, parts, 2, 1);
}

static void write_merged(struct coalescer *c, struct flow *f)
{
    size_t before = ip_header_length(f->first);
    uint8_t *ip = f->head + VNET, *l4 = ip + before, protocol = ip_protocol(f->first);
    size_t l4_total = f->header - before + f->payload;
    bool udp = protocol == PROTO_UDP;
    int check = udp ? UDP_CHECK : TCP_CHECK;

    memcpy(ip, f->first, f->header);
    ip_finish(ip, l4_total);
    if (udp)
        put16(l4 + UDP_LENGTH, (uint16_t)l4_total);
    else
        l4[TCP_FLAGS] |= f->last_flags & PSH;
    put_sum(l4 + check, sum_fold(pseudo_sum(ip, protocol, l4_total)));

    f->head[VNET_FLAGS] = VNET_NEEDS_CSUM;
    f->head[VNET_TYPE] = udp ? VNET_UDP_L4 : ip_version(ip) == 6 ? VNET_TCPV6 : VNET_TCPV4;
    vnet_put16(f->head, VNET_HEADER, (uint16_t)f->header);
    vnet_put16(f->head, VNET_SIZE, (uint16_t)f->size);
    vnet_put16(f->head, VNET_CSUM_START, (uint16_t)before);
    vnet_put16(f->head, VNET_CSUM_OFFSET, (uint16_t)check);
    f->parts[0] = (struct iovec){f->head, VNET + f->header};
    c->write(c->context, f->parts, 1 + (int)f->packets, f->packets);
}

static void close_flow(struct coalescer *c, struct flow *f)
{
    if (!f->used)
        return;
    f->used = false;
    if (f->packets == 1)
        write_single(c, f->first, f->header + f->payload);
    else
        write_merged(c, f);
}

void coalesce_flush(struct coalescer *c)
{
    for (unsigned i = 0; i < FLOWS; i++)
        close_flow(c, &c->flows[i]);
}

static bool l4_intact(const uint8_t *packet, size_t total)
{
    size_t before = ip_header_length(packet);
    uint64_t sum = pseudo_sum(packet, ip_protocol(packet), total - before);
    return sum_fold(sum_bytes(sum, packet + before, total - before)) == 0xffff;
}

/* Length of the headers of a packet that may be merged with others, 0 for one that must go alone. */
static size_t mergeable(const struct coalescer *c, const uint8_t *packet, size_t total)
{
    size_t before = ip_header_length(packet), header;
    const uint8_t *l4 = packet + before;

    if (ip_protocol(packet) == PROTO_TCP) {
        if (!c->tcp || (l4[TCP_FLAGS] & (uint8_t)~PSH) != ACK)
            return 0;
        header = before + (size_t)(l4[TCP_DOFF] >> 4) * 4;
        if (header < before + TCP_HEADER)
            return 0;
    } else {
        header = before + UDP_HEADER;
        if (!c->udp || get16(l4 + UDP_LENGTH) != total - before || get16(l4 + UDP_CHECK) == 0)
            return 0;
    }
    return total > header && l4_intact(packet, total) ? header : 0;
}

static bool same_flow(const struct flow *f, const uint8_t *packet)
{
    if (!f->used || ip_version(f->first) != ip_version(packet) || ip_protocol(f->first) != ip_protocol(packet))
        return false;
    /* Addresses and ports lie together. */
    if (ip_version(packet) == 6)
        return memcmp(f->first + IP6_SRC, packet + IP6_SRC, 36) == 0;
    return memcmp(f->first + IP4_SRC, packet + IP4_SRC, 12) == 0;
}

/* Whether cutting the merged packet again gives the same header of IP. */
static bool header_continues(const struct flow *f, const uint8_t *b)
{
    const uint8_t *a = f->first;
    if (ip_version(a) == 6) /* traffic class, flow label, hop limit */
        return !memcmp(a, b, 4) && a[IP6_HOPS] == b[IP6_HOPS];
    if (a[IP4_TOS] != b[IP4_TOS] || a[IP4_TTL] != b[IP4_TTL] || memcmp(a + IP4_FRAGMENT, b + IP4_FRAGMENT, 2))
        return false;
    /* With DF the id says nothing (RFC 6864). */
    return get16(a + IP4_FRAGMENT) & DF || get16(b + IP4_ID) == (uint16_t)(get16(a + IP4_ID) + f->packets);
}

static bool continues(const struct flow *f, const uint8_t *packet, size_t header, size_t payload)
{
    const uint8_t *a = f->first, *b = packet;
    size_t before = ip_header_length(a);
    bool tcp = ip_protocol(a) == PROTO_TCP;

    if (f->ended || header != f->header || payload > f->size || f->packets >= (tcp ? TCP_MERGED : UDP_MERGED))
        return false;
    if (f->header + f->payload + payload > PACKET_MAX)
        return false;
    if (!header_continues(f, b))
        return false;
    if (!tcp)
        return true;
    a += before;
    b += before;
    /* From the acknowledged number to the end, but for flags and checksum. */
    return get32(b + TCP_SEQ) == (uint32_t)(get32(a + TCP_SEQ) + f->payload) && !memcmp(a + TCP_ACK, b + TCP_ACK, 5) &&
           !memcmp(a + TCP_WINDOW, b + TCP_WINDOW, 2) &&
           !memcmp(a + TCP_URGENT, b + TCP_URGENT, header - before - TCP_URGENT);
}

static void append(struct flow *f, const uint8_t *packet, size_t header, size_t payload)
{
    f->packets++;
    f->parts[f->packets] = (struct iovec){(void *)(packet + header), payload};
    f->payload += payload;
    f->last_flags = ip_protocol(packet) == PROTO_TCP ? packet[ip_header_length(packet) + TCP_FLAGS] : 0;
    f->ended = payload < f->size || f->last_flags & PSH;
}

static struct flow *free_flow(struct coalescer *c)
{
    for (unsigned i = 0; i < FLOWS; i++)
        if (!c->flows[i].used)
            return &c->flows[i];
    struct flow *f = &c->flows[c->oldest];
    c->oldest = (c->oldest + 1) % FLOWS;
    close_flow(c, f);
    return f;
}

static bool has_ports(const uint8_t *packet, size_t total)
{
    if (ip_version(packet) == 4 && (packet[0] != 0x45 || get16(packet + IP4_FRAGMENT) & MF_AND_OFFSET))
        return false;
    size_t before = ip_header_length(packet);
    if (ip_protocol(packet) == PROTO_TCP)
        return total >= before + TCP_HEADER;
    return ip_protocol(packet) == PROTO_UDP && total >= before + UDP_HEADER;
}

void coalesce(struct coalescer *c, const uint8_t *packet, size_t total)
{
    if (!has_ports(packet, total)) {
        /* A fragment, options, extension headers: it may belong to any flow held back, which it must not overtake. */
        if (ip_protocol(packet) != PROTO_ICMP && ip_protocol(packet) != PROTO_ICMP6)
            coalesce_flush(c);
        write_single(c, packet, total);
        return;
    }
    struct flow *f = NULL;
    for (unsigned i = 0; i < FLOWS && !f; i++)
        if (same_flow(&c->flows[i], packet))
            f = &c->flows[i];

    size_t header = mergeable(c, packet, total);
    if (f && header && continues(f, packet, header, total - header)) {
        append(f, packet, header, total - header);
        return;
    }
    if (f)
        close_flow(c, f);
    if (!header) {
        write_single(c, packet, total);
        return;
    }
    if (!f)
        f = free_flow(c);
    f->used = true;
    f->first = packet;
    f->header = header;
    f->size = total - header;
    f->payload = 0;
    f->packets = 0;
    append(f, packet, header, total - header);
}
