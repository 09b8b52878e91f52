/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * The fast way of data path bpf: one plain IPv4 packet per UDP datagram, put in at tc egress of the TUN device
 * and taken out at tc ingress of the external interface (tc-bpf(8), bpf-helpers(7)).
 *
 * Whatever is not an everyday packet is passed on untouched, to the pump behind device and socket. Packets are
 * changed through helpers only, so that those passed on are not even copied.
 *
 * Compiled by `make bpf` into bytecode.py. Needs no header: all of this is the kernel's stable interface.
 */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/* A program is one function: calls are inlined. */
#define INLINE static inline __attribute__((always_inline))
#define PROGRAM(name) __attribute__((section("tc/" name), used))

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define net16(x) ((u16)__builtin_bswap16(x))
#else
#define net16(x) ((u16)(x))
#endif

/* -- linux/bpf.h -------------------------------------------------------------------------------------- */

struct __sk_buff {
    u32 len, pkt_type, mark, queue_mapping, protocol, vlan_present, vlan_tci, vlan_proto, priority;
    u32 ingress_ifindex, ifindex, tc_index, cb[5], hash, tc_classid, data, data_end, napi_id;
    u32 family, remote_ip4, local_ip4, remote_ip6[4], local_ip6[4], remote_port, local_port, data_meta;
    u64 flow_keys, tstamp;
    u32 wire_len, gso_segs;
    u64 sk;
    u32 gso_size;
};

struct bpf_fib_lookup {
    u8 family, l4_protocol;
    u16 sport, dport; /* network order */
    u16 tot_len;
    u32 ifindex;
    u8 tos, unused[3];
    u32 ipv4_src, spare_src[3], ipv4_dst, spare_dst[3];
    u16 vlan_proto, vlan_tci;
    u8 smac[6], dmac[6];
};

enum { TC_ACT_UNSPEC = -1, TC_ACT_SHOT = 2 };
enum { BPF_ADJ_ROOM_MAC = 1, BPF_F_INGRESS = 1 };
enum { ENCAP_L3_IPV4 = 1 << 1, ENCAP_L4_UDP = 1 << 4, FIXED_GSO = 1 << 0 }; /* BPF_F_ADJ_ROOM_... */
enum { BPF_FIB_LOOKUP_OUTPUT = 1 << 1, BPF_FIB_LKUP_RET_SUCCESS = 0, BPF_FIB_LKUP_RET_NO_NEIGH = 7 };

static void *(*map_lookup_elem)(const void *map, const void *key) = (void *)1;
static long (*skb_store_bytes)(struct __sk_buff *, u32 offset, const void *from, u32 length, u64 flags) = (void *)9;
static long (*redirect)(u32 ifindex, u64 flags) = (void *)23;
static long (*skb_load_bytes)(const struct __sk_buff *, u32 offset, void *to, u32 length) = (void *)26;
static long (*skb_change_head)(struct __sk_buff *, u32 length, u64 flags) = (void *)43;
static long (*skb_adjust_room)(struct __sk_buff *, int difference, u32 mode, u64 flags) = (void *)50;
static long (*fib_lookup)(void *, struct bpf_fib_lookup *, int size, u32 flags) = (void *)69;
static long (*redirect_neigh)(u32 ifindex, void *, int, u64 flags) = (void *)152;

/* -- packets ------------------------------------------------------------------------------------------ */

struct ip {
    u8 version_length, tos;
    u16 total, id, fragment;
    u8 ttl, protocol;
    u16 check;
    u32 source, destination;
};

struct udp {
    u16 source, destination, length, check;
};

struct outer {
    struct ip ip;
    struct udp udp;
};

/* What becomes of TTL, protocol and checksum when the TTL falls by one; they lie together. */
struct aged {
    u8 ttl, protocol;
    u16 check;
};

enum { ETHERNET = 14, AGED_AT = 8, OVERHEAD = sizeof(struct outer) };
enum { IPV4 = 0x0800, PLAIN = 0x45, UDP = 17, AF_INET = 2, TO_US = 0 };
enum { MF_AND_OFFSET = 0x3fff, DF = 0x4000, LARGEST = 65535, OUTER_TTL = 64 };

/* -- what the daemon says ----------------------------------------------------------------------------- */

/* Frozen before the programs are loaded: maps.py has the same layout. Addresses and port in network order. */
extern const volatile struct {
    u32 local;         /* the interface's own address */
    u32 external, tun; /* indexes of both devices */
    u32 mtu;           /* of the TUN */
    u16 port;
    u16 allow_unknown;
} settings;

struct prefix {
    u32 length, address;
};

extern char leases; /* LPM trie: struct prefix to the address of the host that leases it */
extern char peers;  /* hash: addresses that datagrams are taken from */
extern char counts; /* array per processor: ENCAPSULATED and DECAPSULATED */

enum { ENCAPSULATED, DECAPSULATED };

struct count {
    u64 packets, bytes;
};

INLINE void count(u32 which, u32 packets, u32 bytes)
{
    struct count *c = map_lookup_elem(&counts, &which);
    if (!c)
        return;
    c->packets += packets;
    c->bytes += bytes;
}

/* How many it will be on a wire; to be asked for before the packet is changed. */
INLINE u32 packets(const struct __sk_buff *skb)
{
    return skb->gso_segs ? skb->gso_segs : 1;
}

/* The TTL is the upper half of its word: the checksum grows by 0x0100, with end-around carry and without -0
 * (RFC 1624 s3). A wrong one stays wrong, and the kernel drops the packet for it. */
INLINE struct aged aged(const struct ip *ip)
{
    u32 check = net16(ip->check) + 0x0100;
    if (check >= 0xffff)
        check++;
    return (struct aged){ip->ttl - 1, ip->protocol, net16((u16)check)};
}

INLINE u16 checksum(const struct ip *ip)
{
    const u16 *word = (const u16 *)ip;
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < 10; i++)
        sum += word[i];
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    return (u16)~sum;
}

/* Whether the host's routes lead to a peer through the external interface, and the largest datagram fits, also into
 * what is known of the path. The size at hand is not asked for: small packets would overtake large ones. */
INLINE int reached(struct __sk_buff *skb, u32 hop)
{
    struct bpf_fib_lookup way = {
        .family = AF_INET,
        .l4_protocol = UDP,
        .sport = settings.port,
        .dport = settings.port,
        .tot_len = (u16)(settings.mtu + OVERHEAD),
        .ifindex = settings.external,
        .ipv4_src = settings.local,
        .ipv4_dst = hop,
    };
    long found = fib_lookup(skb, &way, sizeof way, BPF_FIB_LOOKUP_OUTPUT);
    return found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH;
}

PROGRAM("encap") int encap(struct __sk_buff *skb)
{
    struct ip inner;
    u32 length = skb->len;

    if (skb->protocol != net16(IPV4) || skb_load_bytes(skb, 0, &inner, sizeof inner))
        return TC_ACT_UNSPEC;
    if (inner.version_length != PLAIN || inner.ttl <= 1 || net16(inner.total) != length || length + OVERHEAD > LARGEST)
        return TC_ACT_UNSPEC;
    struct prefix to = {32, inner.destination};
    const u32 *hop = map_lookup_elem(&leases, &to);
    if (!hop || !reached(skb, *hop))
        return TC_ACT_UNSPEC;
    u32 destination = *hop, segments = packets(skb);

    /* Refused for what is in a tunnel already, with nothing changed. */
    if (skb_adjust_room(skb, OVERHEAD, BPF_ADJ_ROOM_MAC, ENCAP_L3_IPV4 | ENCAP_L4_UDP | FIXED_GSO))
        return TC_ACT_UNSPEC;
    /* redirect_neigh wants a link header to replace, which a TUN has not. */
    if (skb_change_head(skb, ETHERNET, 0))
        return TC_ACT_SHOT;
    struct aged now = aged(&inner);
    struct outer outer = {
        {PLAIN, 0, net16((u16)(length + OVERHEAD)), 0, net16(DF), OUTER_TTL, UDP, 0, settings.local, destination},
        {settings.port, settings.port, net16((u16)(length + sizeof(struct udp))), 0},
    };
    outer.ip.check = checksum(&outer.ip);
    if (skb_store_bytes(skb, ETHERNET, &outer, sizeof outer, 0) ||
        skb_store_bytes(skb, ETHERNET + OVERHEAD + AGED_AT, &now, sizeof now, 0))
        return TC_ACT_SHOT;
    count(ENCAPSULATED, segments, length);
    skb->mark = 0; /* was said of the packet inside */
    return (int)redirect_neigh(settings.external, 0, 0, 0);
}

PROGRAM("decap") int decap(struct __sk_buff *skb)
{
    struct {
        struct outer outer;
        struct ip inner;
    } h;

    if (skb->protocol != net16(IPV4) || skb->pkt_type != TO_US ||
        skb_load_bytes(skb, ETHERNET, &h, sizeof h))
        return TC_ACT_UNSPEC;
    const struct ip *ip = &h.outer.ip;
    if (ip->version_length != PLAIN || ip->protocol != UDP || ip->fragment & net16(MF_AND_OFFSET) ||
        ip->destination != settings.local || h.outer.udp.destination != settings.port)
        return TC_ACT_UNSPEC;
    if (!settings.allow_unknown && !map_lookup_elem(&peers, &ip->source))
        return TC_ACT_UNSPEC;
    /* Where datagrams were put together on the way in, the first one inside is shorter than the whole. */
    u32 length = net16(h.inner.total);
    if (h.inner.version_length != PLAIN || h.inner.ttl <= 1 || net16(ip->total) != length + OVERHEAD ||
        net16(h.outer.udp.length) != length + sizeof(struct udp) || skb->len < ETHERNET + OVERHEAD + length)
        return TC_ACT_UNSPEC;
    /* The device would drop it, while it takes anything from the pump. */
    if (length > settings.mtu && !skb->gso_size)
        return TC_ACT_UNSPEC;

    u32 segments = packets(skb);
    if (skb_adjust_room(skb, -(int)OVERHEAD, BPF_ADJ_ROOM_MAC, FIXED_GSO))
        return TC_ACT_UNSPEC;
    struct aged now = aged(&h.inner);
    if (skb_store_bytes(skb, ETHERNET + AGED_AT, &now, sizeof now, 0))
        return TC_ACT_SHOT;
    count(DECAPSULATED, segments, length);
    return (int)redirect(settings.tun, BPF_F_INGRESS);
}
