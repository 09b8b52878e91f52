/* The Python module backends.udp._pump: the loop, and its pure parts for tests. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>

#include "pump.h"

typedef struct {
    PyObject_HEAD
    struct pump *pump;
    bool running;
} PumpObject;

static const char *const counter_names[COUNTERS] = {
    "tx_packets", "tx_bytes", "tx_messages", "rx_packets", "rx_bytes", "rx_writes", "no_route", "ttl_exceeded",
    "too_big", "malformed", "icmp_sent", "tx_dropped", "rx_dropped", "unknown_sender",
};

static bool is_version(int version)
{
    if (version == 4 || version == 6)
        return true;
    PyErr_SetString(PyExc_ValueError, "IP has versions 4 and 6");
    return false;
}

/* An address from its bytes as on the wire, none from no bytes. */
static bool address_from(int version, const Py_buffer *bytes, struct address *address)
{
    *address = (struct address){0, 0};
    if (bytes->len == 0)
        return true;
    if (bytes->len != (version == 6 ? 16 : 4)) {
        PyErr_SetString(PyExc_ValueError, "not an address of the pump's family");
        return false;
    }
    *address = address_at(version, bytes->buf);
    return true;
}

static struct routes *routes_from(int version, const Py_buffer *packed, struct address own, struct address overlay)
{
    Py_ssize_t each = version == 6 ? 3 * 16 : 3 * 4;
    if (packed->len % each) {
        PyErr_SetString(PyExc_ValueError, "ranges are triples of addresses");
        return NULL;
    }
    struct routes *routes = routes_new(version, packed->buf, (size_t)(packed->len / each), own, overlay);
    if (!routes && errno == EINVAL)
        PyErr_SetString(PyExc_ValueError, "ranges must ascend without overlap, each with a next hop");
    else if (!routes)
        PyErr_NoMemory();
    return routes;
}

static bool admit_only(struct routes *routes, int version, const Py_buffer *peers)
{
    Py_ssize_t each = version == 6 ? 16 : 4;
    if (peers->len % each == 0 && routes_close(routes, version, peers->buf, (size_t)(peers->len / each)))
        return true;
    if (peers->len % each == 0 && errno == ENOMEM)
        PyErr_NoMemory();
    else
        PyErr_SetString(PyExc_ValueError, "peers must be addresses in ascending order");
    return false;
}

/* -- the type Pump ------------------------------------------------------------------------------------ */

static int pump_init(PumpObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tun", "socket", "vnet_hdr", "tso", "uso", "gso", "port", "mtu_bytes", "version", NULL};
    int tun, sock, vnet, tso, uso, gso, version;
    unsigned short port, mtu;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii$ppppHHi", names, &tun, &sock, &vnet, &tso, &uso, &gso, &port,
                                     &mtu, &version) ||
        !is_version(version))
        return -1;
    if (self->pump) {
        PyErr_SetString(PyExc_RuntimeError, "the pump is initialised already");
        return -1;
    }
    self->pump = pump_new(version, tun, sock, vnet, tso, uso, gso, port, mtu);
    if (!self->pump) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    return 0;
}

static void pump_dealloc(PumpObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->pump)
        pump_free(self->pump);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static bool usable(PumpObject *self)
{
    if (!self->pump)
        PyErr_SetString(PyExc_RuntimeError, "the pump is not initialised");
    return self->pump != NULL;
}

static PyObject *method_run(PumpObject *self, PyObject *unused)
{
    (void)unused;
    if (!usable(self))
        return NULL;
    if (self->running) {
        PyErr_SetString(PyExc_RuntimeError, "the pump runs already");
        return NULL;
    }
    int error;
    self->running = true;
    Py_BEGIN_ALLOW_THREADS
    error = pump_run(self->pump);
    Py_END_ALLOW_THREADS
    self->running = false;
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyObject *method_stop(PumpObject *self, PyObject *unused)
{
    (void)unused;
    if (!usable(self))
        return NULL;
    pump_stop(self->pump);
    Py_RETURN_NONE;
}

static PyObject *method_forward(PumpObject *self, PyObject *args)
{
    Py_buffer packed, own_bytes, overlay_bytes, peers = {.buf = NULL};
    struct address own, overlay;
    if (!usable(self) || !PyArg_ParseTuple(args, "y*y*y*z*", &packed, &own_bytes, &overlay_bytes, &peers))
        return NULL;
    int version = self->pump->version;
    struct routes *routes = NULL;
    if (address_from(version, &own_bytes, &own) && address_from(version, &overlay_bytes, &overlay))
        routes = routes_from(version, &packed, own, overlay);
    if (routes && peers.buf && !admit_only(routes, version, &peers)) {
        routes_free(routes);
        routes = NULL;
    }
    PyBuffer_Release(&packed);
    PyBuffer_Release(&own_bytes);
    PyBuffer_Release(&overlay_bytes);
    if (peers.buf)
        PyBuffer_Release(&peers);
    if (!routes)
        return NULL;
    pump_forward(self->pump, routes);
    Py_RETURN_NONE;
}

static PyObject *method_stats(PumpObject *self, PyObject *unused)
{
    (void)unused;
    if (!usable(self))
        return NULL;
    PyObject *result = PyDict_New();
    for (int i = 0; result && i < COUNTERS; i++) {
        PyObject *value = PyLong_FromUnsignedLong(atomic_load_explicit(&self->pump->count[i], memory_order_relaxed));
        if (!value || PyDict_SetItemString(result, counter_names[i], value))
            Py_CLEAR(result);
        Py_XDECREF(value);
    }
    return result;
}

static PyMethodDef pump_methods[] = {
    {"run", (PyCFunction)method_run, METH_NOARGS, "Carry packets without the GIL; return after stop()."},
    {"stop", (PyCFunction)method_stop, METH_NOARGS, "Let run() return at once."},
    {"forward", (PyCFunction)method_forward, METH_VARARGS, "Replace ranges and the sources of ICMP errors."},
    {"stats", (PyCFunction)method_stats, METH_NOARGS, "Return the counters by name."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot pump_slots[] = {
    {Py_tp_doc, (void *)"A pump between a TUN descriptor and a UDP socket, which stay the caller's."},
    {Py_tp_init, (void *)pump_init},
    {Py_tp_dealloc, (void *)pump_dealloc},
    {Py_tp_methods, pump_methods},
    {0, NULL},
};

static PyType_Spec pump_spec = {
    .name = "backends.udp._pump.Pump",
    .basicsize = sizeof(PumpObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = pump_slots,
};

/* -- pure parts --------------------------------------------------------------------------------------- */

static PyObject *joined(const struct iovec *parts, int n)
{
    size_t length = 0;
    for (int i = 0; i < n; i++)
        length += parts[i].iov_len;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
    if (!result)
        return NULL;
    char *to = PyBytes_AS_STRING(result);
    for (int i = 0; i < n; i++) {
        memcpy(to, parts[i].iov_base, parts[i].iov_len);
        to += parts[i].iov_len;
    }
    return result;
}

static bool append_joined(PyObject *list, const struct iovec *parts, int n)
{
    PyObject *one = joined(parts, n);
    bool good = one && !PyList_Append(list, one);
    Py_XDECREF(one);
    return good;
}

static bool segment_into(PyObject *list, const uint8_t *vnet, uint8_t *packet, size_t total)
{
    struct cut cut;
    uint8_t head[HEADERS_MAX];
    const uint8_t *body;
    size_t length;

    if (vnet[VNET_TYPE] == VNET_NONE) {
        if (vnet[VNET_FLAGS] & VNET_NEEDS_CSUM && !finish_checksum(vnet, packet, total))
            return true;
        struct iovec whole = {packet, total};
        return append_joined(list, &whole, 1);
    }
    if (!cut_begin(&cut, vnet, packet, total))
        return true;
    while (cut_next(&cut, head, &body, &length)) {
        struct iovec parts[2] = {{head, cut.ip + cut.l4}, {(void *)body, length}};
        if (!append_joined(list, parts, 2))
            return false;
    }
    return true;
}

static PyObject *module_segment(PyObject *module, PyObject *argument)
{
    (void)module;
    Py_buffer given;
    if (PyObject_GetBuffer(argument, &given, PyBUF_SIMPLE))
        return NULL;
    PyObject *list = PyList_New(0);
    /* A copy of exactly this size lets a sanitizer see every step beyond the packet. */
    uint8_t *copy = malloc(given.len ? (size_t)given.len : 1);
    if (list && copy && given.len > VNET) {
        memcpy(copy, given.buf, (size_t)given.len);
        size_t total = ip_check(copy + VNET, (size_t)given.len - VNET);
        if (total && !segment_into(list, copy, copy + VNET, total))
            Py_CLEAR(list);
    }
    free(copy);
    PyBuffer_Release(&given);
    return list;
}

struct writes {
    PyObject *list;
    bool failed;
};

static void note_write(void *context, const struct iovec *parts, int n, unsigned packets)
{
    struct writes *w = context;
    (void)packets;
    if (!append_joined(w->list, parts, n))
        w->failed = true;
}

static PyObject *module_coalesce(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *given;
    int tcp, udp;
    if (!PyArg_ParseTuple(args, "O!pp", &PyList_Type, &given, &tcp, &udp))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(given);
    struct writes w = {PyList_New(0), false};
    struct coalescer *c = malloc(sizeof *c);
    uint8_t **copies = calloc((size_t)n + 1, sizeof *copies);
    if (!w.list || !c || !copies)
        w.failed = true;
    else
        coalesce_init(c, tcp, udp, note_write, &w);
    for (Py_ssize_t i = 0; i < n && !w.failed; i++) {
        char *bytes;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(PyList_GET_ITEM(given, i), &bytes, &length) ||
            !(copies[i] = malloc(length ? (size_t)length : 1))) {
            w.failed = true;
            break;
        }
        memcpy(copies[i], bytes, (size_t)length);
        size_t total = ip_check(copies[i], (size_t)length);
        if (total)
            coalesce(c, copies[i], total);
    }
    if (!w.failed)
        coalesce_flush(c);
    for (Py_ssize_t i = 0; copies && i < n; i++)
        free(copies[i]);
    free(copies);
    free(c);
    if (w.failed) {
        Py_CLEAR(w.list);
        if (!PyErr_Occurred())
            PyErr_NoMemory();
    }
    return w.list;
}

static PyObject *module_hops(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer packed;
    PyObject *destinations;
    int version;
    const struct address none = {0, 0};
    if (!PyArg_ParseTuple(args, "iy*O!", &version, &packed, &PyList_Type, &destinations))
        return NULL;
    struct routes *routes = is_version(version) ? routes_from(version, &packed, none, none) : NULL;
    PyBuffer_Release(&packed);
    if (!routes)
        return NULL;
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < PyList_GET_SIZE(destinations); i++) {
        Py_buffer bytes;
        struct address destination;
        uint8_t hop[16];
        if (PyObject_GetBuffer(PyList_GET_ITEM(destinations, i), &bytes, PyBUF_SIMPLE)) {
            Py_CLEAR(list);
            break;
        }
        bool good = address_from(version, &bytes, &destination);
        PyBuffer_Release(&bytes);
        put_address(version, hop, routes_hop(routes, destination));
        PyObject *one = good ? PyBytes_FromStringAndSize((char *)hop, version == 6 ? 16 : 4) : NULL;
        if (!one || PyList_Append(list, one))
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    routes_free(routes);
    return list;
}

static PyObject *module_decrement_ttl(PyObject *module, PyObject *argument)
{
    (void)module;
    Py_buffer given;
    if (PyObject_GetBuffer(argument, &given, PyBUF_SIMPLE))
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(given.buf, given.len);
    PyBuffer_Release(&given);
    if (!result)
        return NULL;
    uint8_t *packet = (uint8_t *)PyBytes_AS_STRING(result);
    if (!ip_check(packet, (size_t)PyBytes_GET_SIZE(result)) || ip_ttl(packet) == 0) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_ValueError, "no IP packet with a TTL to take from");
        return NULL;
    }
    ip_decrement_ttl(packet);
    return result;
}

static PyObject *module_icmp_error(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer given;
    Py_buffer from;
    int kind;
    unsigned short mtu;
    if (!PyArg_ParseTuple(args, "iy*y*H", &kind, &given, &from, &mtu))
        return NULL;
    uint8_t out[ICMP6_MAX];
    struct address source;
    size_t total = ip_check(given.buf, (size_t)given.len), length = 0;
    bool good = kind >= UNREACHABLE && kind <= EXCEEDED && (!total || address_from(ip_version(given.buf), &from, &source));
    if (good && total && icmp_allowed(given.buf, total))
        length = icmp_error(out, (enum icmp_kind)kind, mtu, given.buf, total, source);
    PyBuffer_Release(&given);
    PyBuffer_Release(&from);
    if (PyErr_Occurred())
        return NULL;
    return length ? PyBytes_FromStringAndSize((char *)out, (Py_ssize_t)length) : Py_NewRef(Py_None);
}

static PyMethodDef module_methods[] = {
    {"segment", module_segment, METH_O, "Return the packets that a vnet header and a (super-)packet stand for."},
    {"coalesce", module_coalesce, METH_VARARGS, "Return what is written to the TUN for packets received."},
    {"hops", module_hops, METH_VARARGS, "Return the next hop of each destination, 0 for none."},
    {"decrement_ttl", module_decrement_ttl, METH_O, "Return the packet with one taken from its TTL."},
    {"icmp_error", module_icmp_error, METH_VARARGS, "Return the ICMP error about a packet, None if none may be sent."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&pump_spec);
    if (!type)
        return -1;
    int failed = PyModule_AddObjectRef(module, "Pump", type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "backends.udp._pump",
    .m_doc = "The pump of the udp backend: TUN and UDP socket, with every offload the kernel has.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__pump(void) { return PyModuleDef_Init(&module_def); }
