/* Input: whether to repair the packet, how often to repeat its end, vnet header, packet. */
#include "segment.h"

#include "fuzz.h"

/* What may differ between a segment and the packet it was cut from is checked field by field; the rest is equal. */
static void check_ip(const uint8_t *whole, size_t ip, const uint8_t *segment, size_t total, unsigned number)
{
    uint8_t *expected = copied(whole, ip);
    if (ip_version(whole) == 6) {
        put16(expected + IP6_PAYLOAD, (uint16_t)(total - IP6_HEADER));
    } else {
        put16(expected + IP4_TOTAL, (uint16_t)total);
        put16(expected + IP4_ID, (uint16_t)(get16(whole + IP4_ID) + number));
        memcpy(expected + IP4_CHECK, segment + IP4_CHECK, 2);
    }
    REQUIRE(!memcmp(expected, segment, ip));
    REQUIRE(is_packet(segment, total));
    free(expected);
}

static void check_tcp(const uint8_t *whole, size_t l4, const uint8_t *tcp, size_t at, int last)
{
    uint8_t *expected = copied(whole, l4), flags = whole[TCP_FLAGS];
    put32(expected + TCP_SEQ, get32(whole + TCP_SEQ) + (uint32_t)at);
    expected[TCP_FLAGS] = (uint8_t)(flags & ~((last ? 0 : FIN | PSH) | (at ? CWR : 0)));
    memcpy(expected + TCP_CHECK, tcp + TCP_CHECK, 2);
    REQUIRE(!memcmp(expected, tcp, l4));
    free(expected);
}

static void check_udp(const uint8_t *whole, const uint8_t *udp, size_t total)
{
    REQUIRE(!memcmp(whole, udp, 4));
    REQUIRE(get16(udp + UDP_LENGTH) == total);
    REQUIRE(get16(udp + UDP_CHECK) != 0);
}

static void check_cut(struct cut *cut, const uint8_t *vnet, const uint8_t *packet, size_t total)
{
    size_t size = vnet16(vnet, VNET_SIZE), headers = cut->ip + cut->l4, at = headers, length;
    const uint8_t *body;
    unsigned number = 0;
    REQUIRE(headers <= HEADERS_MAX && headers < total);
    REQUIRE(cut->protocol == PROTO_TCP || cut->protocol == PROTO_UDP);

    for (uint8_t *head = allocate(HEADERS_MAX); ; number++) {
        if (!cut_next(cut, head, &body, &length)) {
            free(head);
            break;
        }
        REQUIRE(body == packet + at && length && at + length <= total);
        REQUIRE(length == size || (length < size && at + length == total));
        uint8_t *segment = allocate(headers + length);
        memcpy(segment, head, headers);
        memcpy(segment + headers, body, length);
        check_ip(packet, cut->ip, segment, headers + length, number);
        if (cut->protocol == PROTO_TCP)
            check_tcp(packet + cut->ip, cut->l4, segment + cut->ip, at - headers, at + length == total);
        else
            check_udp(packet + cut->ip, segment + cut->ip, cut->l4 + length);
        REQUIRE(l4_added(segment, headers + length, cut->ip, cut->protocol) == 0xffff);
        free(segment);
        at += length;
    }
    REQUIRE(at == total);
}

static void check_finished(const uint8_t *vnet, uint8_t *packet, size_t total)
{
    size_t start = vnet16(vnet, VNET_CSUM_START), place = start + vnet16(vnet, VNET_CSUM_OFFSET);
    uint8_t *before = copied(packet, total);
    uint32_t sum;
    if (!finish_checksum(vnet, packet, total)) {
        REQUIRE(!memcmp(before, packet, total));
        free(before);
        return;
    }
    REQUIRE(start >= ip_header_length(before) && place + 2 <= total);
    REQUIRE(!memcmp(before, packet, place) && !memcmp(before + place + 2, packet + place + 2, total - place - 2));
    /* What stood in the field, as the pseudo-header's part, and the complement that stands there now make it whole. */
    sum = added(added(0, before + place, 2), packet + start, total - start);
    REQUIRE((place - start) % 2 || sum == 0xffff || sum == 0);
    if (ip_version(before) == 4 && before[IP4_PROTO] == PROTO_UDP && place - start == UDP_CHECK)
        REQUIRE(get16(packet + place) != 0);
    free(before);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, size};
    uint8_t how = take8(&in);
    size_t repeats = take16(&in);
    if (in.left <= VNET)
        return 0;
    /* Long packets from short input. */
    size_t given = in.left - VNET, length = given + repeats > PACKET_MAX ? PACKET_MAX : given + repeats;
    if (given > PACKET_MAX)
        return 0;
    uint8_t *vnet = copied(in.at, VNET), *packet = allocate(length);
    for (size_t i = 0; i < length; i++)
        packet[i] = in.at[VNET + (i < given ? i : given - 1 - (i - given) % (given < 64 ? 1 : given - 60))];
    if (how & 1)
        repair(packet, length);

    size_t total = ip_check(packet, length);
    REQUIRE(total <= length);
    REQUIRE(!total || is_packet(packet, total));
    if (total) {
        uint8_t *exact = copied(packet, total);
        struct cut cut;
        if (vnet[VNET_TYPE] == VNET_NONE)
            check_finished(vnet, exact, total);
        else if (cut_begin(&cut, vnet, exact, total))
            check_cut(&cut, vnet, exact, total);
        free(exact);
    }
    free(packet);
    free(vnet);
    return 0;
}
