#define _GNU_SOURCE
#include "pump.h"

#include <errno.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif
#ifndef SOL_UDP
#define SOL_UDP 17
#endif

enum { SEND_WAIT_MS = 20, PAUSE_MS = 10 };
#define ICMP_PER_SECOND 1000.0

static const uint8_t no_vnet[VNET];

static void count(struct pump *p, enum counter which, unsigned long more)
{
    /* The loop is the only writer. */
    unsigned long value = atomic_load_explicit(&p->count[which], memory_order_relaxed);
    atomic_store_explicit(&p->count[which], value + more, memory_order_relaxed);
}

/* -- writing to the TUN ------------------------------------------------------------------------------- */

static bool tun_write(struct pump *p, const struct iovec *parts, int n)
{
    /* Without vnet header the first part, which is that header alone, is left out. */
    ssize_t done;
    do
        done = writev(p->tun, p->vnet ? parts : parts + 1, p->vnet ? n : n - 1);
    while (done < 0 && errno == EINTR);
    if (done >= 0)
        return true;
    if (errno == EBADFD || errno == EFAULT)
        p->gone = errno;
    return false; /* the device is down, or the kernel finds fault with the packet */
}

static void deliver(void *context, const struct iovec *parts, int n, unsigned packets)
{
    struct pump *p = context;
    count(p, RX_WRITES, 1);
    if (!tun_write(p, parts, n))
        count(p, RX_DROPPED, packets);
}

/* -- writing to the socket ---------------------------------------------------------------------------- */

static bool stopped(struct pump *p) { return atomic_load_explicit(&p->stop, memory_order_acquire); }

/* Takes note that somebody woke the loop. */
static void awake(struct pump *p)
{
    uint64_t ignored;
    if (read(p->wake, &ignored, sizeof ignored) < 0)
        return; /* nobody did */
}

/* Ends early for a stop alone: new routes have the time. */
static void wait_for(struct pump *p, short events, int timeout_ms)
{
    struct pollfd fds[2] = {{p->wake, POLLIN, 0}, {p->sock, events, 0}};
    nfds_t n = events ? 2 : 1;
    if (poll(fds, n, timeout_ms) > 0 && fds[0].revents && !stopped(p)) {
        awake(p);
        poll(fds, n, timeout_ms);
    }
}

/* Returns 0 or an errno. size is that of the datagrams if the message carries more than one, else 0. */
static int send_message(struct pump *p, struct address hop, const struct iovec *parts, int n, size_t size)
{
    union {
        struct sockaddr_in four;
        struct sockaddr_in6 six;
    } to;
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(uint16_t))];
    } control;
    struct msghdr message = {.msg_name = &to, .msg_iov = (struct iovec *)parts, .msg_iovlen = (size_t)n};
    if (p->version == 6) {
        to.six = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons(p->port)};
        put_address(6, to.six.sin6_addr.s6_addr, hop);
        message.msg_namelen = sizeof to.six;
    } else {
        to.four = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(p->port)};
        to.four.sin_addr.s_addr = htonl((uint32_t)hop.low);
        message.msg_namelen = sizeof to.four;
    }
    if (size) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_UDP;
        c->cmsg_type = UDP_SEGMENT;
        c->cmsg_len = CMSG_LEN(sizeof(uint16_t));
        uint16_t value = (uint16_t)size;
        memcpy(CMSG_DATA(c), &value, sizeof value);
    }
    for (int attempt = 0;; attempt++) {
        if (sendmsg(p->sock, &message, MSG_DONTWAIT) >= 0)
            return 0;
        if (errno == EINTR)
            continue;
        if ((errno != EAGAIN && errno != ENOBUFS) || attempt)
            return errno;
        wait_for(p, POLLOUT, SEND_WAIT_MS);
    }
}

/* -- ICMP errors -------------------------------------------------------------------------------------- */

/* A token bucket, as the kernel has one (icmp_msgs_per_sec in ip-sysctl.rst). */
static bool icmp_granted(struct pump *p)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    double now = (double)t.tv_sec + (double)t.tv_nsec / 1e9;
    p->icmp_tokens += (now - p->icmp_filled_s) * ICMP_PER_SECOND;
    if (p->icmp_tokens > ICMP_PER_SECOND / 10)
        p->icmp_tokens = ICMP_PER_SECOND / 10;
    p->icmp_filled_s = now;
    if (p->icmp_tokens < 1)
        return false;
    p->icmp_tokens -= 1;
    return true;
}

/* local: the sender is on this side of the TUN. */
static void answer(struct pump *p, enum icmp_kind kind, const uint8_t *offender, size_t have, bool local)
{
    uint8_t packet[ICMP6_MAX];
    struct address source = local ? p->routes->overlay : p->routes->own;

    if (!address_set(source) || !icmp_allowed(offender, have))
        return;
    struct address hop = routes_hop(p->routes, ip_source(offender));
    if ((!local && !address_set(hop)) || !icmp_granted(p))
        return;
    struct iovec parts[2] = {{(void *)no_vnet, VNET}, {packet, 0}};
    parts[1].iov_len = icmp_error(packet, kind, p->mtu, offender, have, source);
    if (local ? tun_write(p, parts, 2) : send_message(p, hop, parts + 1, 1, 0) == 0)
        count(p, ICMP_SENT, 1);
}

/* -- TUN to socket ------------------------------------------------------------------------------------ */

static void sent(struct pump *p, unsigned packets, size_t bytes)
{
    count(p, TX_PACKETS, packets);
    count(p, TX_BYTES, bytes);
    count(p, TX_MESSAGES, 1);
}

static void too_big(struct pump *p, const struct iovec *parts, int n)
{
    uint8_t start[ICMP6_MAX];
    size_t have = 0;
    for (int i = 0; i < n && have < sizeof start; i++) {
        size_t room = sizeof start - have, length = parts[i].iov_len < room ? parts[i].iov_len : room;
        memcpy(start + have, parts[i].iov_base, length);
        have += length;
    }
    count(p, TOO_BIG, 1);
    if (ip_unfragmentable(start))
        answer(p, TOO_LARGE, start, have, true);
}

/* A message of many datagrams may meet refusals that a single one does not: it does not fit a shrunken link,
 * where single ones are fragmented, or the link or a policy cannot cut. */
static bool only_together(int error)
{
    return error == EMSGSIZE || error == EINVAL || error == EIO || error == EOPNOTSUPP;
}

static void send_run(struct pump *p, struct run *r)
{
    if (r->segments > 1 && p->gso) {
        int error = send_message(p, r->hop, r->part, r->parts, r->size);
        if (!error) {
            sent(p, r->segments, r->bytes);
            return;
        }
        if (!only_together(error)) {
            count(p, TX_DROPPED, r->segments);
            return;
        }
    }
    r->begins[r->segments] = (uint16_t)r->parts;
    for (unsigned i = 0; i < r->segments; i++) {
        const struct iovec *parts = r->part + r->begins[i];
        int n = r->begins[i + 1] - r->begins[i];
        int error = send_message(p, r->hop, parts, n, 0);
        if (error == EMSGSIZE)
            too_big(p, parts, n);
        else if (error)
            count(p, TX_DROPPED, 1);
        else
            sent(p, 1, parts[0].iov_len + (n > 1 ? parts[1].iov_len : 0));
    }
}

/* Runs are open in the order of their age, and sent in it. */
static void send_runs(struct pump *p)
{
    for (unsigned i = 0; i < p->open; i++)
        send_run(p, &p->runs[i]);
    p->open = 0;
}

/* Sends everything; no header is in use any more. */
static void send_all(struct pump *p)
{
    send_runs(p);
    p->headers_used = 0;
}

/* A full run waits for those behind it: sent together they find the receiver awake. */
static struct run *run_for(struct pump *p, struct address hop, size_t size)
{
    for (unsigned i = p->open; i-- > 0;) {
        struct run *r = &p->runs[i];
        if (!address_equal(r->hop, hop))
            continue;
        if (!r->ended && size <= r->size && r->segments < RUN_SEGMENTS && r->bytes + size <= DATAGRAM_MAX)
            return r;
        break;
    }
    if (p->open == RUNS)
        send_runs(p); /* the packet to come may have a header already */
    struct run *r = &p->runs[p->open++];
    r->hop = hop;
    r->segments = 0;
    r->size = size;
    return r;
}

static void enqueue(struct pump *p, struct address hop, const uint8_t *head, size_t head_length, const uint8_t *body,
                    size_t body_length)
{
    size_t size = head_length + body_length;
    struct run *r = run_for(p, hop, size);
    if (!r->segments) {
        r->bytes = 0;
        r->parts = 0;
    }
    r->begins[r->segments++] = (uint16_t)r->parts;
    r->part[r->parts++] = (struct iovec){(void *)head, head_length};
    if (body_length)
        r->part[r->parts++] = (struct iovec){(void *)body, body_length};
    r->bytes += size;
    r->ended = size < r->size;
}

static void enqueue_cut(struct pump *p, struct address hop, struct cut *cut)
{
    for (;;) {
        if (p->headers_used == OUT_HEADERS)
            send_all(p);
        uint8_t *head = p->headers[p->headers_used];
        const uint8_t *body;
        size_t length;
        if (!cut_next(cut, head, &body, &length))
            return;
        p->headers_used++;
        enqueue(p, hop, head, cut->ip + cut->l4, body, length);
    }
}

/* Returns the length of a whole packet of the pump's family, 0 for anything else. */
static size_t whole(struct pump *p, const uint8_t *packet, size_t length)
{
    return length && ip_version(packet) == p->version ? ip_check(packet, length) : 0;
}

static void take_outward(struct pump *p, const uint8_t *vnet, uint8_t *packet, size_t length)
{
    struct cut cut;
    size_t total = whole(p, packet, length);
    if (!total) {
        count(p, MALFORMED, 1);
        return;
    }
    struct address hop = routes_hop(p->routes, ip_destination(packet));
    if (!address_set(hop)) {
        count(p, NO_ROUTE, 1);
        answer(p, UNREACHABLE, packet, total, true);
        return;
    }
    if (ip_ttl(packet) <= 1) {
        count(p, TTL_EXCEEDED, 1);
        answer(p, EXCEEDED, packet, total, true);
        return;
    }
    ip_decrement_ttl(packet);
    if (vnet[VNET_TYPE] != VNET_NONE) {
        if (cut_begin(&cut, vnet, packet, total))
            enqueue_cut(p, hop, &cut);
        else
            count(p, MALFORMED, 1);
        return;
    }
    if (vnet[VNET_FLAGS] & VNET_NEEDS_CSUM && !finish_checksum(vnet, packet, total)) {
        count(p, MALFORMED, 1);
        return;
    }
    enqueue(p, hop, packet, total, NULL, 0);
}

/* A change is in force for the next packet: runs hold addresses, not what they were looked up in. */
static void take_routes(struct pump *p)
{
    if (!atomic_load_explicit(&p->next, memory_order_relaxed))
        return;
    struct routes *next = atomic_exchange(&p->next, NULL);
    if (next) {
        routes_free(p->routes);
        p->routes = next;
    }
}

static bool outward(struct pump *p)
{
    size_t at = 0, before = p->vnet ? VNET : 0;

    while (at + VNET + PACKET_MAX <= OUT_BYTES && !p->gone) {
        ssize_t got = read(p->tun, p->out + at, VNET + PACKET_MAX);
        if (got < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN)
                p->gone = errno;
            break;
        }
        take_routes(p);
        if ((size_t)got > before)
            take_outward(p, p->vnet ? p->out + at : no_vnet, p->out + at + before, (size_t)got - before);
        at += (size_t)got;
    }
    send_all(p);
    return at > 0;
}

/* -- socket to TUN ------------------------------------------------------------------------------------ */

static void take_inward(struct pump *p, uint8_t *packet, size_t length)
{
    size_t total = whole(p, packet, length);
    if (!total) {
        count(p, MALFORMED, 1);
        return;
    }
    if (ip_ttl(packet) <= 1) {
        count(p, TTL_EXCEEDED, 1);
        answer(p, EXCEEDED, packet, total, false);
        return;
    }
    ip_decrement_ttl(packet);
    count(p, RX_PACKETS, 1);
    count(p, RX_BYTES, total);
    coalesce(&p->coalescer, packet, total);
}

/* Returns the size of each datagram of an aggregate, 0 for a single one. */
static size_t datagram_size(struct msghdr *message)
{
    int size = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c))
        if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO)
            memcpy(&size, CMSG_DATA(c), sizeof size);
    return size > 0 ? (size_t)size : 0;
}

/* Returns the bytes received, -1 when nothing waits. */
static ssize_t receive(struct pump *p, uint8_t *buffer, size_t *each, bool *admitted)
{
    union {
        struct sockaddr_in four;
        struct sockaddr_in6 six;
    } from;
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {buffer, PACKET_MAX};
    struct msghdr message = {.msg_name = &from, .msg_namelen = sizeof from, .msg_iov = &part, .msg_iovlen = 1,
                             .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t got;
    do
        got = recvmsg(p->sock, &message, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got < 0) {
        /* Out of memory, say: a readable socket that cannot be read must not become a busy loop. */
        if (errno != EAGAIN)
            wait_for(p, 0, PAUSE_MS);
        return -1;
    }
    if (p->version == 6)
        *admitted = message.msg_namelen >= sizeof from.six &&
                    routes_admit(p->routes, address_at(6, from.six.sin6_addr.s6_addr));
    else
        *admitted = message.msg_namelen >= sizeof from.four &&
                    routes_admit(p->routes, address_at(4, (const uint8_t *)&from.four.sin_addr));
    *each = datagram_size(&message);
    if (!*each || *each > (size_t)got)
        *each = (size_t)got;
    return got;
}

static bool inward(struct pump *p)
{
    size_t at = 0, each;
    int messages = 0;
    bool admitted;

    take_routes(p);
    for (; messages < IN_MESSAGES && at + PACKET_MAX <= IN_BYTES && !p->gone; messages++) {
        ssize_t got = receive(p, p->in + at, &each, &admitted);
        if (got < 0)
            break;
        if (!admitted) {
            count(p, UNKNOWN_SENDER, each ? ((size_t)got + each - 1) / each : 1);
            continue;
        }
        size_t end = at + (size_t)got;
        if (got == 0)
            count(p, MALFORMED, 1);
        for (; at < end; at += each) {
            if (each > end - at)
                each = end - at;
            take_inward(p, p->in + at, each);
        }
    }
    coalesce_flush(&p->coalescer);
    return messages > 0;
}

/* -- life --------------------------------------------------------------------------------------------- */

struct pump *pump_new(int version, int tun, int sock, bool vnet, bool tso, bool uso, bool gso, uint16_t port,
                      uint16_t mtu)
{
    const struct address none = {0, 0};
    struct pump *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    p->routes = routes_new(version, NULL, 0, none, none);
    p->headers = malloc(OUT_HEADERS * sizeof *p->headers);
    p->out = malloc(OUT_BYTES);
    p->in = malloc(IN_BYTES);
    if (p->wake < 0 || !p->routes || !p->headers || !p->out || !p->in) {
        int error = errno;
        pump_free(p);
        errno = error;
        return NULL;
    }
    p->version = version;
    p->tun = tun;
    p->sock = sock;
    p->vnet = vnet;
    p->gso = gso;
    p->port = port;
    p->mtu = mtu;
    coalesce_init(&p->coalescer, vnet && tso, vnet && uso, deliver, p);
    return p;
}

void pump_free(struct pump *p)
{
    if (p->wake >= 0)
        close(p->wake);
    routes_free(p->routes);
    routes_free(atomic_load(&p->next));
    free(p->headers);
    free(p->out);
    free(p->in);
    free(p);
}

static void wake(struct pump *p)
{
    uint64_t one = 1;
    /* It fails only when the counter is full: then the loop is awake. */
    ssize_t ignored = write(p->wake, &one, sizeof one);
    (void)ignored;
}

void pump_stop(struct pump *p)
{
    atomic_store(&p->stop, true);
    wake(p);
}

void pump_forward(struct pump *p, struct routes *routes)
{
    routes_free(atomic_exchange(&p->next, routes));
    wake(p);
}

static void sleep_until_readable(struct pump *p)
{
    struct pollfd fds[3] = {{p->tun, POLLIN, 0}, {p->sock, POLLIN, 0}, {p->wake, POLLIN, 0}};
    if (poll(fds, 3, -1) > 0 && fds[2].revents)
        awake(p);
}

int pump_run(struct pump *p)
{
    p->gone = 0;
    while (!stopped(p) && !p->gone) {
        take_routes(p);
        bool moved = outward(p);
        moved |= inward(p);
        /* What somebody woke the loop for may have been passed over while it waited. */
        if (!moved && !p->gone && !stopped(p) && !atomic_load(&p->next))
            sleep_until_readable(p);
    }
    return p->gone;
}
