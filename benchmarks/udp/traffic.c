/* Small packets and round trips over UDP, for measurements.
 *
 *   traffic receive ADDRESS[,ADDRESS] CREDIT_TO
 *   traffic send SECONDS CREDIT_AT ADDRESS[,ADDRESS]     -> packets that arrived per second
 *   traffic echo ADDRESS
 *   traffic ping SECONDS ADDRESS                         -> median and 99th percentile in microseconds
 *
 * A sender without bounds would starve the pumps of processors and measure the scheduler: at most WINDOW packets are
 * under way, and credit comes back outside the tunnel. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PORT = 4500, CREDIT_PORT = 4501, PAYLOAD = 64, WINDOW = 256, BATCH = 32, TARGETS = 2, SAMPLES = 1 << 20 };

static struct sockaddr_in at(const char *address, uint16_t port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = inet_addr(address)};
    return a;
}

static int bound(const char *address, uint16_t port)
{
    int fd = socket(AF_INET, SOCK_DGRAM, 0), size = 8 << 20;
    struct sockaddr_in a = at(address, port);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size);
    if (bind(fd, (struct sockaddr *)&a, sizeof a)) {
        perror("bind");
        exit(1);
    }
    return fd;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int split(char *list, const char **out)
{
    int n = 0;
    for (char *one = strtok(list, ","); one && n < TARGETS; one = strtok(NULL, ","))
        out[n++] = one;
    return n;
}

static void receive(char *list, const char *credit_to)
{
    static char space[BATCH][PAYLOAD];
    const char *addresses[TARGETS];
    int n = split(list, addresses), fds[TARGETS], out = socket(AF_INET, SOCK_DGRAM, 0);
    struct pollfd waiting[TARGETS];
    struct mmsghdr messages[BATCH];
    struct iovec parts[BATCH];
    struct sockaddr_in to = at(credit_to, CREDIT_PORT);
    uint32_t seen = 0, told = 0;
    for (int i = 0; i < n; i++) {
        fds[i] = bound(addresses[i], PORT);
        waiting[i] = (struct pollfd){fds[i], POLLIN, 0};
    }
    for (int i = 0; i < BATCH; i++) {
        parts[i] = (struct iovec){space[i], PAYLOAD};
        messages[i] = (struct mmsghdr){.msg_hdr = {.msg_iov = &parts[i], .msg_iovlen = 1}};
    }
    for (;;) {
        /* When nothing comes for a while the sender may be waiting for credit that was lost. */
        int ready = poll(waiting, (nfds_t)n, 20);
        for (int i = 0; i < n && ready > 0; i++) {
            int got = recvmmsg(fds[i], messages, BATCH, MSG_DONTWAIT, NULL);
            seen += got > 0 ? (uint32_t)got : 0;
        }
        if (seen - told >= BATCH || ready == 0) {
            told = seen;
            sendto(out, &told, sizeof told, 0, (struct sockaddr *)&to, sizeof to);
        }
    }
}

static void send_small(double seconds, const char *credit_at, char *list)
{
    static char payload[PAYLOAD];
    const char *addresses[TARGETS];
    int n = split(list, addresses), credit = bound(credit_at, CREDIT_PORT), out = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in to[TARGETS];
    struct mmsghdr messages[BATCH];
    struct iovec part = {payload, PAYLOAD};
    for (int i = 0; i < n; i++)
        to[i] = at(addresses[i], PORT);
    for (int i = 0; i < BATCH; i++)
        messages[i] = (struct mmsghdr){
            .msg_hdr = {.msg_name = &to[i % n], .msg_namelen = sizeof to[0], .msg_iov = &part, .msg_iovlen = 1}};
    uint32_t sent = 0, seen = 0, first = 0, lost = 0;
    struct pollfd waiting = {credit, POLLIN, 0};
    double begin = now() + 0.3, end = begin + seconds, t;
    int begun = 0;
    recv(credit, &seen, sizeof seen, 0);
    uint32_t base = seen;
    while ((t = now()) < end) {
        if (!begun && t >= begin) {
            begun = 1;
            first = seen;
        }
        if (sent - lost - (seen - base) + BATCH <= WINDOW) {
            int done = sendmmsg(out, messages, BATCH, 0);
            sent += done > 0 ? (uint32_t)done : 0;
            if (recv(credit, &seen, sizeof seen, MSG_DONTWAIT) < 0)
                continue;
        } else if (poll(&waiting, 1, 30) > 0) {
            recv(credit, &seen, sizeof seen, 0);
        } else {
            lost = sent - (seen - base); /* nothing is under way any more */
        }
    }
    printf("%.0f\n", (double)(seen - first) / (t - begin));
}

static void echo(const char *address)
{
    char data[2048];
    int fd = bound(address, PORT);
    struct sockaddr_in from;
    for (;;) {
        socklen_t length = sizeof from;
        ssize_t got = recvfrom(fd, data, sizeof data, 0, (struct sockaddr *)&from, &length);
        if (got > 0)
            sendto(fd, data, (size_t)got, 0, (struct sockaddr *)&from, length);
    }
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void ping(double seconds, const char *address)
{
    static double samples[SAMPLES];
    char data[PAYLOAD] = {0};
    int fd = socket(AF_INET, SOCK_DGRAM, 0), n = 0;
    struct sockaddr_in to = at(address, PORT);
    struct pollfd waiting = {fd, POLLIN, 0};
    connect(fd, (struct sockaddr *)&to, sizeof to);
    for (double end = now() + seconds; n < SAMPLES && now() < end;) {
        double began = now();
        send(fd, data, sizeof data, 0);
        if (poll(&waiting, 1, 200) > 0 && recv(fd, data, sizeof data, 0) > 0)
            samples[n++] = (now() - began) * 1e6;
    }
    if (!n)
        exit(1);
    qsort(samples, (size_t)n, sizeof *samples, ascending);
    printf("%.1f %.1f\n", samples[n / 2], samples[(size_t)(n * 0.99)]);
}

int main(int argc, char **argv)
{
    if (argc == 4 && !strcmp(argv[1], "receive"))
        receive(argv[2], argv[3]);
    else if (argc == 5 && !strcmp(argv[1], "send"))
        send_small(atof(argv[2]), argv[3], argv[4]);
    else if (argc == 3 && !strcmp(argv[1], "echo"))
        echo(argv[2]);
    else if (argc == 4 && !strcmp(argv[1], "ping"))
        ping(atof(argv[2]), argv[3]);
    else
        return 2;
    return 0;
}
