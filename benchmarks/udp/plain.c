/* The yardstick: a pump built as upstream's proxy is (pkg/backend/udp/proxy_amd64.c): one thread, one packet per
 * system call, no offload, a list of routes that is searched from its beginning and whose hit changes places with
 * the first. Arguments: descriptors of TUN and socket, port. Routes on standard input, "network length hop" each,
 * up to an empty line. Ends with its parent's end of standard input. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct route {
    uint32_t network, mask;
    struct sockaddr_in hop;
};

static struct route *routes;
static size_t count;

static void read_routes(uint16_t port)
{
    char line[128], network[32], hop[32];
    int length;
    size_t room = 0;
    while (fgets(line, sizeof line, stdin) && sscanf(line, "%31s %d %31s", network, &length, hop) == 3) {
        if (count == room) {
            room = room ? 2 * room : 64;
            routes = realloc(routes, room * sizeof *routes);
            if (!routes)
                exit(1);
        }
        struct route *r = &routes[count++];
        memset(r, 0, sizeof *r);
        r->network = ntohl(inet_addr(network));
        r->mask = length ? ~0u << (32 - length) : 0;
        r->hop.sin_family = AF_INET;
        r->hop.sin_port = htons(port);
        r->hop.sin_addr.s_addr = inet_addr(hop);
    }
}

static struct sockaddr_in *lookup(uint32_t destination)
{
    for (size_t i = 0; i < count; i++)
        if ((destination & routes[i].mask) == routes[i].network) {
            struct route found = routes[i];
            routes[i] = routes[0];
            routes[0] = found;
            return &routes[0].hop;
        }
    return NULL;
}

static bool age(uint8_t *packet)
{
    if (packet[8] == 0 || --packet[8] == 0)
        return false;
    uint32_t sum = ((uint32_t)packet[10] << 8 | packet[11]) + 0x0100;
    sum = (sum & 0xffff) + (sum >> 16);
    packet[10] = (uint8_t)(sum >> 8);
    packet[11] = (uint8_t)sum;
    return true;
}

static bool outward(int tun, int sock, uint8_t *packet, size_t size)
{
    ssize_t got = read(tun, packet, size);
    if (got < 20)
        return got >= 0;
    struct sockaddr_in *hop = lookup(ntohl(*(uint32_t *)(void *)(packet + 16)));
    if (hop && age(packet))
        sendto(sock, packet, (size_t)got, 0, (struct sockaddr *)hop, sizeof *hop);
    return true;
}

static bool inward(int tun, int sock, uint8_t *packet, size_t size)
{
    ssize_t got = recv(sock, packet, size, MSG_DONTWAIT);
    if (got < 20)
        return got >= 0;
    if (age(packet))
        while (write(tun, packet, (size_t)got) < 0 && errno == EAGAIN)
            ;
    return true;
}

int main(int argc, char **argv)
{
    static uint8_t packet[65536] __attribute__((aligned(4)));
    if (argc != 4)
        return 2;
    int tun = atoi(argv[1]), sock = atoi(argv[2]);
    read_routes((uint16_t)atoi(argv[3]));
    struct pollfd fds[3] = {{tun, POLLIN, 0}, {sock, POLLIN, 0}, {0, POLLIN, 0}};
    for (;;) {
        if (poll(fds, 3, -1) < 0 && errno != EINTR)
            return 1;
        if (fds[2].revents)
            return 0;
        bool moved;
        do {
            moved = outward(tun, sock, packet, sizeof packet);
            moved |= inward(tun, sock, packet, sizeof packet);
        } while (moved);
    }
}
