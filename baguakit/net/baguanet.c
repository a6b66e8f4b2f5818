/* baguanet: TCP for NCCL, over several streams (TCP flows) per connection.
 *
 * A cloud often limits the bandwidth of one TCP flow (for example to 5 Gb/s on a NIC of 100 Gb/s), and one core cannot
 * saturate a fast NIC. NCCL's own sockets cut a message into equal parts, so that the slowest flow determines the time.
 * This plugin cuts a message into chunks. A stream takes the next chunk when it has sent one, so slow streams take few.
 *
 *     isend m, m+1, …  →  queue of chunks  →  stream 0 … S−1, a thread each  →  irecv m, m+1, …
 *
 * A chunk is sent as (message, size of the message, offset, length) and its bytes, which are read directly into the
 * buffer of the receive. The m-th send of a connection matches its m-th receive: a message has one receive
 * (maxRecvs = 1), so the order suffices, and tags are ignored. On each stream the numbers m of the chunks never fall.
 * So a stream can wait until the receive of its chunk is posted; this cannot cause a deadlock.
 *
 * NCCL finds the plugin by NCCL_NET_PLUGIN=/path/libnccl-net-baguanet.so. NCCL_NET_PLUGIN_REF_COUNT=1 makes NCCL keep
 * the plugin when its last communicator ends: without it, versions 2.28.3 to 2.29.7 drop the plugin, and the next
 * communicator uses NCCL's sockets. A process that sends over the plugin says so once on stderr, for any NCCL_DEBUG;
 * with NCCL_DEBUG=INFO, NCCL prints "Using network baguanet". Plugins are configured by environment variables only.
 * These variables of NCCL mean the same as in NCCL:
 *
 *     NCCL_SOCKET_IFNAME   the interfaces: prefixes "eth,ib", names "=eth0,eth1", or all but these "^docker", "^=eth2"
 *     NCCL_SOCKET_FAMILY   AF_INET or AF_INET6 if an interface has both
 *
 * This plugin has the following variables, shown with their defaults:
 *
 *     BAGUANET_STREAMS=4        streams of a connection, 1 to 64; if ranks differ, the sender's value is used
 *     BAGUANET_CHUNK=131072     bytes of a chunk, 4096 to 1 GiB
 *     BAGUANET_PACING=0         most bytes per second of a stream, for shared links and for tests; 0: no limit
 *     BAGUANET_TIMEOUT=120      seconds until a peer that does not answer counts as lost; 0: the system's timeout.
 *                               A slow peer that answers is not lost.
 *
 * The plugin implements versions 8 (NCCL 2.20 to 2.27) and 11 (from 2.28) of NCCL's network interface. NCCL with
 * version 12 also loads version 11; version 12 adds rails and planes of a fabric, which TCP devices lack. NCCL does
 * not need a tuner or GIN of a plugin. The plugin sends host memory; NCCL copies GPU memory to host memory. After an
 * error on this rank or its peer, a connection cannot be used: `test` returns the error for all unfinished requests. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* ---- The types of NCCL that this plugin uses, in NCCL's layout ---- */

typedef enum {
    success,
    cuda_error,
    system_error,
    internal_error,
    invalid_argument,
    invalid_usage,
    remote_error
} result;

enum { LOG_WARN = 2, LOG_INFO = 3 };
enum { ABOUT_INIT = 0x1, ABOUT_NET = 0x10 };
typedef void (*log_function)(int level, unsigned long about, const char *file, int line, const char *format, ...);

enum { HANDLE_BYTES = 128, HOST_MEMORY = 1, MOST_DEVICES_FUSED = 4 };

struct properties_v8 {
    char *name, *pci_path;
    uint64_t guid;
    int memory, registered_for_all, megabits, port;
    float latency;
    int connections, receives_grouped, offload, offload_version;
};

struct properties_v11 {
    char *name, *pci_path;
    uint64_t guid;
    int memory, registered_for_all, force_flush, megabits, port;
    float latency;
    int connections, receives_grouped, offload, offload_version;
    struct {
        int count, devices[MOST_DEVICES_FUSED];
    } fused;
    size_t largest_message, largest_collective;
    int requests_in_one;
};

struct net_v8 {
    const char *name;
    result (*init)(log_function);
    result (*devices)(int *count);
    result (*properties)(int device, struct properties_v8 *);
    result (*listen)(int device, void *handle, void **listener);
    result (*connect)(int device, void *handle, void **sender, void **offloaded);
    result (*accept)(void *listener, void **receiver, void **offloaded);
    result (*register_memory)(void *connection, void *data, size_t size, int type, void **region);
    result (*register_dma_buffer)(void *connection, void *data, size_t size, int type, uint64_t offset, int fd,
                                  void **region);
    result (*deregister_memory)(void *connection, void *region);
    result (*isend)(void *sender, void *data, int size, int tag, void *region, void **request);
    result (*irecv)(void *receiver, int n, void **data, int *sizes, int *tags, void **regions, void **request);
    result (*iflush)(void *receiver, int n, void **data, int *sizes, void **regions, void **request);
    result (*test)(void *request, int *done, int *sizes);
    result (*close_send)(void *sender);
    result (*close_receive)(void *receiver);
    result (*close_listen)(void *listener);
    result (*device_memory)(void *connection, void *region, void **device_region);
    result (*receive_consumed)(void *receiver, int n, void *request);
};

struct net_v11 {
    const char *name;
    result (*init)(void **context, uint64_t communicator, void *options, log_function, void *profiler);
    result (*devices)(int *count);
    result (*properties)(int device, struct properties_v11 *);
    result (*listen)(void *context, int device, void *handle, void **listener);
    result (*connect)(void *context, int device, void *handle, void **sender, void **offloaded);
    result (*accept)(void *listener, void **receiver, void **offloaded);
    result (*register_memory)(void *connection, void *data, size_t size, int type, void **region);
    result (*register_dma_buffer)(void *connection, void *data, size_t size, int type, uint64_t offset, int fd,
                                  void **region);
    result (*deregister_memory)(void *connection, void *region);
    result (*isend)(void *sender, void *data, size_t size, int tag, void *region, void *profile, void **request);
    result (*irecv)(void *receiver, int n, void **data, size_t *sizes, int *tags, void **regions, void **profiles,
                    void **request);
    result (*iflush)(void *receiver, int n, void **data, int *sizes, void **regions, void **request);
    result (*test)(void *request, int *done, int *sizes);
    result (*close_send)(void *sender);
    result (*close_receive)(void *receiver);
    result (*close_listen)(void *listener);
    result (*device_memory)(void *connection, void *region, void **device_region);
    result (*receive_consumed)(void *receiver, int n, void *request);
    result (*fuse_devices)(int *device, void *properties);
    result (*finalize)(void *context);
    result (*attributes)(void *context, void *attributes);
};

/* ---- Settings, devices, sockets ---- */

enum { MOST_STREAMS = 64, MOST_DEVICES = 16, SLOTS = 64, LEAST_CHUNK = 4096 };

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

struct device {
    char name[IF_NAMESIZE];
    char *pci_path;
    union address address;
};

static pthread_mutex_t setup = PTHREAD_MUTEX_INITIALIZER;  /* guards the static variables, which `start` sets */
static int users;
static log_function logger;
static struct {
    uint64_t streams, chunk, pacing, timeout;
} settings;
static struct device devices[MOST_DEVICES];
static int device_count;

__attribute__((format(printf, 3, 0))) static void say_listed(int level, int line, const char *format, va_list list) {
    char sentence[512];
    vsnprintf(sentence, sizeof sentence, format, list);
    if (logger) logger(level, ABOUT_INIT | ABOUT_NET, "baguanet.c", line, "baguanet: %s", sentence);
}

__attribute__((format(printf, 3, 4))) static void say(int level, int line, const char *format, ...) {
    va_list list;
    va_start(list, format);
    say_listed(level, line, format, list);
    va_end(list);
}

#define SAY(level, ...) say(level, __LINE__, __VA_ARGS__)

static bool setting(const char *name, uint64_t otherwise, uint64_t least, uint64_t most, uint64_t *value) {
    const char *text = getenv(name);
    char *end = NULL;
    *value = otherwise;
    if (!text || !*text) return true;
    errno = 0;
    *value = strtoull(text, &end, 10);
    if (*text >= '0' && *text <= '9' && !*end && !errno && *value >= least && *value <= most) return true;
    SAY(LOG_WARN, "%s is \"%s\", and must be a whole number from %llu to %llu", name, text, (unsigned long long)least,
        (unsigned long long)most);
    return false;
}

/* Return whether a list has an interface, by NCCL's rules: "^" excludes, "=" compares whole names; ignore ":port". */
static bool chosen(const char *name, const char *list) {
    bool exclude = *list == '^';
    list += exclude;
    bool whole = *list == '=';
    list += whole;
    bool empty = true, found = false;
    while (*list) {
        size_t entry = strcspn(list, ","), length = strcspn(list, ",:");
        if (length) {
            empty = false;
            found |= !strncmp(name, list, length) && (!whole || !name[length]);
        }
        list += entry + (list[entry] == ',');
    }
    return (empty || found) != exclude;
}

static void find_devices(const struct ifaddrs *all, const char *list, int family) {
    for (const struct ifaddrs *i = all; i && device_count < MOST_DEVICES; i = i->ifa_next) {
        if (!i->ifa_addr || !(i->ifa_flags & IFF_RUNNING) || strlen(i->ifa_name) >= IF_NAMESIZE) continue;
        int its = i->ifa_addr->sa_family;
        if ((its != AF_INET && its != AF_INET6) || (family && its != family) || !chosen(i->ifa_name, list)) continue;
        union address address = {0};
        memcpy(&address, i->ifa_addr, its == AF_INET ? sizeof address.v4 : sizeof address.v6);
        /* Skip link-local addresses: a peer can use them only if it knows the interface. */
        if (its == AF_INET6 &&
            (IN6_IS_ADDR_LOOPBACK(&address.v6.sin6_addr) || IN6_IS_ADDR_LINKLOCAL(&address.v6.sin6_addr)))
            continue;
        bool known = false;
        for (int d = 0; d < device_count; d++) known |= !strcmp(devices[d].name, i->ifa_name);
        if (known) continue;
        struct device *device = &devices[device_count++];
        char path[PATH_MAX];
        strcpy(device->name, i->ifa_name);
        snprintf(path, sizeof path, "/sys/class/net/%s/device", i->ifa_name);
        device->pci_path = realpath(path, NULL);  /* NULL for virtual interfaces */
        device->address = address;
    }
}

static result find_all_devices(void) {
    const char *wanted = getenv("NCCL_SOCKET_IFNAME"), *version = getenv("NCCL_SOCKET_FAMILY");
    int family = !version ? 0 : !strcmp(version, "AF_INET") ? AF_INET : !strcmp(version, "AF_INET6") ? AF_INET6 : 0;
    static const char *const defaults[] = {"ib", "^docker,lo,virbr", "docker", "lo", "virbr"};
    struct ifaddrs *all;
    if (device_count) return success;
    if (getifaddrs(&all)) {
        SAY(LOG_WARN, "the network interfaces cannot be listed: %s", strerror(errno));
        return system_error;
    }
    if (wanted && strlen(wanted) > 1)
        find_devices(all, wanted, family);
    else
        for (size_t i = 0; i < sizeof defaults / sizeof *defaults && !device_count; i++)
            find_devices(all, defaults[i], family);
    freeifaddrs(all);
    if (device_count) return success;
    SAY(LOG_WARN, "no running interface has an address and fits NCCL_SOCKET_IFNAME=%s", wanted ? wanted : "(not set)");
    return invalid_usage;
}

static int megabits(const struct device *device) {
    char path[64];
    int speed = 0;
    snprintf(path, sizeof path, "/sys/class/net/%s/speed", device->name);
    FILE *file = fopen(path, "re");
    if (file) {
        if (fscanf(file, "%d", &speed) != 1) speed = 0;
        fclose(file);
    }
    return speed > 0 ? speed : 10000;  /* NCCL, too, assumes this if the speed is unknown */
}

static const char *text_of(const union address *address, char text[NI_MAXHOST + NI_MAXSERV]) {
    char host[NI_MAXHOST] = "?", port[NI_MAXSERV] = "?";
    getnameinfo(&address->any, sizeof *address, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
    snprintf(text, NI_MAXHOST + NI_MAXSERV, "%s port %s", host, port);
    return text;
}

static void set(int fd, int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);  /* an error is ignored: older kernels lack some options */
}

static void prepare(int fd) {
    set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    if (!settings.timeout) return;
    int quarter = settings.timeout < 4 ? 1 : (int)settings.timeout / 4;
    set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(fd, IPPROTO_TCP, TCP_KEEPIDLE, quarter);
    set(fd, IPPROTO_TCP, TCP_KEEPINTVL, quarter);
    set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
    struct timeval look = {.tv_sec = quarter};  /* how often a send that waits checks whether its peer is gone */
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &look, sizeof look);
}

/* Return whether a peer to which bytes are in flight no longer answers. Keepalive does not probe while bytes are in
 * flight. TCP_USER_TIMEOUT would also drop a live peer whose receive window is full, as in a long evaluation. */
static bool is_gone(int fd) {
    struct tcp_info info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &(socklen_t){sizeof info})) return false;
    bool asked = info.tcpi_retransmits > 1 || info.tcpi_probes > 1;
    return asked && info.tcpi_last_ack_recv > settings.timeout * 1000;
}

static void prepare_to_send(int fd) {
    /* Limit the unsent bytes in the kernel, because a faster stream cannot take them over. */
    set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, (int)settings.chunk);
    if (settings.pacing) setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &settings.pacing, sizeof settings.pacing);
}

/* Read `size` bytes. Return 1, or 0 if the stream ended before the first byte, or −errno. */
static int read_all(int fd, void *to, size_t size) {
    for (size_t got = 0; got < size;) {
        ssize_t n = recv(fd, (char *)to + got, size - got, MSG_WAITALL);
        if (n > 0)
            got += (size_t)n;
        else if (n == 0)
            return got ? -ECONNRESET : 0;
        else if (errno != EINTR)
            return -errno;
    }
    return 1;
}

/* ---- A connection: requests, and the streams that carry their chunks ---- */

struct chunk {
    uint64_t message, size, offset, length;
};

struct span {
    uint64_t begin, end;
};

struct request {
    struct connection *connection;
    uint64_t message;
    char *data;
    size_t size;     /* bytes to send; of a receive: bytes of the buffer or, once known, of the message */
    size_t claimed;  /* of a send: bytes that streams have begun to send */
    size_t moved;    /* of a receive: bytes that have arrived */
    bool known;      /* of a receive: whether `size` is that of the message */
    struct span *spans;            /* of a receive: ranges that streams have begun to read, ascending and merged */
    size_t span_count, span_room;  /* the allocated room is reused by the next request in this slot */
    int busy;                      /* streams that use `data` now */
    bool used;
    atomic_bool done;
};

struct stream {
    struct connection *connection;
    int fd;
    pthread_t thread;
    bool ended, waits; /* of a receiver: at its end; has a chunk of `message`, whose receive is not posted yet */
    uint64_t message;
};

struct connection {
    pthread_mutex_t mutex;
    pthread_cond_t posting;  /* a request was posted, or `stop` was set */
    pthread_cond_t leaving;  /* a stream no longer uses the data of a request */
    bool stop;
    atomic_int error;  /* a result; never reset */
    uint64_t posted;   /* requests so far */
    uint64_t handed;   /* of a sender: the message whose chunks are being handed out */
    struct request requests[SLOTS];
    union address peer;
    int streams, running;
    struct stream stream[MOST_STREAMS];
};

/* Callers of functions named `…_locked` hold the connection's mutex. */

static void stop_locked(struct connection *c) {
    c->stop = true;
    for (int i = 0; i < c->streams; i++) shutdown(c->stream[i].fd, SHUT_RDWR);
    pthread_cond_broadcast(&c->posting);
}

__attribute__((format(printf, 3, 4))) static void fail_locked(struct connection *c, result error, const char *why,
                                                              ...) {
    va_list list;
    if (c->stop) return;  /* errors after a failure or a close are not reported */
    va_start(list, why);
    say_listed(LOG_WARN, __LINE__, why, list);
    va_end(list);
    atomic_store(&c->error, error);
    stop_locked(c);
}

static void lose_locked(struct connection *c, struct stream *s, int error) {
    char text[NI_MAXHOST + NI_MAXSERV];
    fail_locked(c, remote_error, "stream %d with %s was lost: %s", (int)(s - c->stream), text_of(&c->peer, text),
                strerror(error));
}

static struct request *unfinished_locked(struct connection *c) {
    for (int i = 0; i < SLOTS; i++)
        if (c->requests[i].used && !atomic_load(&c->requests[i].done)) return &c->requests[i];
    return NULL;
}

/* Fail if posted receives lack bytes that can no longer arrive, because every stream has ended or has a chunk of a
 * later message: chunks are sent in order, so such a stream has no more chunks of earlier messages. While a stream
 * waits with a chunk, it does not read, so it does not notice when the peer closes. */
static void settle_locked(struct connection *c) {
    for (int i = 0; i < c->streams; i++) {
        const struct stream *s = &c->stream[i];
        if (!s->ended && !(s->waits && s->message >= c->posted)) return;
    }
    if (unfinished_locked(c)) fail_locked(c, remote_error, "the peer closed, or went on, before it had sent all");
}

static void leave_locked(struct request *r) {
    r->busy--;
    pthread_cond_broadcast(&r->connection->leaving);
}

/* Send a chunk; return 0 or an errno. The peer writes nothing after its welcome. If recv returns 0, the peer closed. */
static int write_chunk(int fd, struct chunk *chunk, char *data) {
    struct iovec parts[] = {{chunk, sizeof *chunk}, {data, chunk->length}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    char byte;
    if (recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) return ECONNRESET;
    while (parts[0].iov_len + parts[1].iov_len) {
        ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (n < 0 && (errno == EINTR || (errno == EAGAIN && !is_gone(fd)))) continue;
        if (n < 0) return errno == EAGAIN ? ETIMEDOUT : errno;
        for (int i = 0; i < 2; i++) {
            size_t part = (size_t)n < parts[i].iov_len ? (size_t)n : parts[i].iov_len;
            parts[i].iov_base = (char *)parts[i].iov_base + part;
            parts[i].iov_len -= part;
            n -= (ssize_t)part;
        }
    }
    return 0;
}

static void *send_chunks(void *argument) {
    struct stream *s = argument;
    struct connection *c = s->connection;
    pthread_mutex_lock(&c->mutex);
    for (;;) {
        while (!c->stop && c->handed == c->posted) pthread_cond_wait(&c->posting, &c->mutex);
        if (c->stop) break;
        struct request *r = &c->requests[c->handed % SLOTS];
        size_t left = r->size - r->claimed, length = left < settings.chunk ? left : settings.chunk;
        struct chunk chunk = {r->message, r->size, r->claimed, length};
        r->claimed += length;
        r->busy++;
        if (r->claimed == r->size) c->handed++;
        pthread_mutex_unlock(&c->mutex);

        int error = write_chunk(s->fd, &chunk, r->data + chunk.offset);

        pthread_mutex_lock(&c->mutex);
        leave_locked(r);
        if (error)
            lose_locked(c, s, error);
        else if (r->claimed == r->size && !r->busy && !c->stop)
            atomic_store(&r->done, true);
    }
    pthread_mutex_unlock(&c->mutex);
    return NULL;
}

/* Add a range to the spans of a receive; return false if the connection failed. A range that overlaps a span is an
 * error: its bytes would count twice, and the message would end too early. Chunks are large, so spans are few. */
static bool take_span_locked(struct request *r, uint64_t begin, uint64_t end) {
    size_t low = 0, high = r->span_count;
    while (low < high) {  /* the first span that ends at `begin` or later */
        size_t middle = (low + high) / 2;
        if (r->spans[middle].end < begin)
            low = middle + 1;
        else
            high = middle;
    }
    struct span *at = r->spans + low;
    bool after = low < r->span_count && at->end == begin;  /* the range continues `at` */
    size_t next = low + after;
    if (next < r->span_count && r->spans[next].begin < end) {
        fail_locked(r->connection, internal_error, "bytes of message %llu came twice: the peer is not of this kind",
                    (unsigned long long)r->message);
        return false;
    }
    bool before = next < r->span_count && r->spans[next].begin == end;
    if (after && before) {
        at->end = r->spans[next].end;
        memmove(at + 1, at + 2, (--r->span_count - low - 1) * sizeof *at);
    } else if (after) {
        at->end = end;
    } else if (before) {
        at->begin = begin;
    } else {
        if (r->span_count == r->span_room) {
            size_t room = r->span_room ? 2 * r->span_room : 8;
            struct span *more = realloc(r->spans, room * sizeof *more);
            if (!more) {
                fail_locked(r->connection, system_error, "no memory for %zu spans of a message", room);
                return false;
            }
            r->spans = more;
            r->span_room = room;
        }
        at = r->spans + low;
        memmove(at + 1, at, (r->span_count++ - low) * sizeof *at);
        *at = (struct span){begin, end};
    }
    return true;
}

/* Return whether a chunk lies within its message and has at least LEAST_CHUNK bytes, or is the last of the message. */
static bool is_possible(const struct chunk *chunk) {
    if (chunk->length > chunk->size || chunk->offset > chunk->size - chunk->length) return false;
    bool last = chunk->offset + chunk->length == chunk->size && (chunk->length || !chunk->size);
    return last || chunk->length >= LEAST_CHUNK;
}

/* Wait until the receive of a chunk is posted, mark it as busy, and return it; NULL if the connection stops. */
static struct request *receive_of_locked(struct stream *s, const struct chunk *chunk) {
    struct connection *c = s->connection;
    s->waits = true;
    s->message = chunk->message;
    while (!c->stop && chunk->message >= c->posted) {
        settle_locked(c);
        if (!c->stop) pthread_cond_wait(&c->posting, &c->mutex);
    }
    s->waits = false;
    if (c->stop) return NULL;
    struct request *r = &c->requests[chunk->message % SLOTS];
    bool expected = r->used && r->message == chunk->message && !atomic_load(&r->done);
    if (!expected || !is_possible(chunk) || (r->known && chunk->size != r->size))
        fail_locked(c, internal_error, "a chunk of message %llu fits no receive: the peer is not of this kind",
                    (unsigned long long)chunk->message);
    else if (chunk->size > r->size)
        fail_locked(c, invalid_usage, "a message of %llu bytes does not fit its receive of %zu bytes",
                    (unsigned long long)chunk->size, r->size);
    else if (take_span_locked(r, chunk->offset, chunk->offset + (chunk->size ? chunk->length : 1))) {
        r->size = chunk->size;
        r->known = true;
        r->busy++;
    }
    return c->stop ? NULL : r;
}

static void *receive_chunks(void *argument) {
    struct stream *s = argument;
    struct connection *c = s->connection;
    for (;;) {
        struct chunk chunk;
        int got = read_all(s->fd, &chunk, sizeof chunk);
        pthread_mutex_lock(&c->mutex);
        if (got == 0) {
            s->ended = true;
            settle_locked(c);
        } else if (got < 0)
            lose_locked(c, s, -got);
        struct request *r = got == 1 ? receive_of_locked(s, &chunk) : NULL;
        pthread_mutex_unlock(&c->mutex);
        if (!r) return NULL;

        got = read_all(s->fd, r->data + chunk.offset, chunk.length);

        pthread_mutex_lock(&c->mutex);
        r->moved += chunk.length;
        leave_locked(r);
        if (got < 1)
            lose_locked(c, s, got ? -got : ECONNRESET);
        else if (r->moved == r->size && !c->stop)
            atomic_store(&r->done, true);
        pthread_mutex_unlock(&c->mutex);
    }
}

static void close_connection(struct connection *c) {
    pthread_mutex_lock(&c->mutex);
    stop_locked(c);
    pthread_mutex_unlock(&c->mutex);
    for (int i = 0; i < c->running; i++) pthread_join(c->stream[i].thread, NULL);
    for (int i = 0; i < c->streams; i++) close(c->stream[i].fd);
    for (int i = 0; i < SLOTS; i++) free(c->requests[i].spans);
    pthread_cond_destroy(&c->leaving);
    pthread_cond_destroy(&c->posting);
    pthread_mutex_destroy(&c->mutex);
    free(c);
}

/* Return a connection that owns these connected sockets; NULL if memory or threads are not available. */
static struct connection *open_connection(const int *sockets, int streams, bool sends) {
    struct connection *c = calloc(1, sizeof *c);
    sigset_t all, before;
    if (!c) {
        for (int i = 0; i < streams; i++) close(sockets[i]);
        return NULL;
    }
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->posting, NULL);
    pthread_cond_init(&c->leaving, NULL);
    c->streams = streams;
    getpeername(sockets[0], &c->peer.any, &(socklen_t){sizeof c->peer});
    for (int i = 0; i < streams; i++) {
        c->stream[i] = (struct stream){.connection = c, .fd = sockets[i]};
        fcntl(sockets[i], F_SETFL, fcntl(sockets[i], F_GETFL) & ~O_NONBLOCK);
        if (sends) prepare_to_send(sockets[i]);
    }
    sigfillset(&all);  /* block all signals in the new threads: the program's own threads handle them */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int error = 0; c->running < streams && !error; c->running += !error) {
        struct stream *s = &c->stream[c->running];
        char name[16];
        error = pthread_create(&s->thread, NULL, sends ? send_chunks : receive_chunks, s);
        snprintf(name, sizeof name, "baguanet-%s%d", sends ? "tx" : "rx", c->running % MOST_STREAMS);
        if (error)
            SAY(LOG_WARN, "thread %d of %d cannot be made: %s", c->running, streams, strerror(error));
        else
            pthread_setname_np(s->thread, name);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (c->running == streams) return c;
    close_connection(c);
    return NULL;
}

/* ---- Connecting: each stream sends a hello; it gets a welcome when all streams of its connection have done so ---- */

#define MAGIC 0x626167756e657431ull  /* a peer of the other byte order has another number, and is refused */

struct handle {  /* NCCL sends it from the listener to the connector */
    uint64_t magic, key;
    union address address;
};
_Static_assert(sizeof(struct handle) <= HANDLE_BYTES, "a handle must fit");

struct hello {
    uint64_t magic, key, connection;
    uint32_t stream, streams;
};

struct welcome {
    uint64_t magic, connection;
};

/* Read `size` bytes without waiting. Return 1, or −errno; if not all have arrived, read nothing and return 0. */
static int read_whole(int fd, void *to, size_t size) {
    ssize_t n = recv(fd, to, size, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0) return errno == EAGAIN || errno == EINTR ? 0 : -errno;
    if (n == 0) return -ECONNRESET;
    if ((size_t)n == size) return read_all(fd, to, size);
    struct pollfd end = {.fd = fd, .events = POLLRDHUP};
    return poll(&end, 1, 0) > 0 ? -ECONNRESET : 0;  /* at the end, the rest will never arrive */
}

static bool write_whole(int fd, const void *from, size_t size) {
    return send(fd, from, size, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)size;  /* an empty send buffer has room */
}

static uint64_t draw(void) {
    uint64_t number = 0;
    while (getrandom(&number, sizeof number, 0) != sizeof number) continue;
    return number;
}

/* A guest is an accepted socket. It has greeted once a valid hello with the key has arrived; before, it is silent.
 * Silent guests are strangers, or peers whose hello is in flight. A silent guest is closed only to make room, after
 * SECONDS_TO_GREET. Strangers can thus delay a peer, but not close its socket. They get at most MOST_SILENT sockets. */
enum { MOST_SILENT = 256, MOST_GREETED = 64 * MOST_STREAMS, SECONDS_TO_GREET = 5 };

struct guest {
    int fd;
    bool greeted;
    time_t came;
    struct hello hello;
};

struct listener {
    int fd, guests, silent;
    uint64_t key;
    struct guest guest[MOST_SILENT + MOST_GREETED];
};

static time_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec;
}

static result listen_on(int device, void *opaque, void **out) {
    struct listener *l = NULL;
    *out = NULL;
    if (device < 0 || device >= device_count) {
        SAY(LOG_WARN, "there is no device %d among %d", device, device_count);
        return invalid_argument;
    }
    struct handle handle = {MAGIC, draw(), devices[device].address};
    socklen_t size = sizeof handle.address;
    int family = handle.address.any.sa_family;
    if (family == AF_INET) handle.address.v4.sin_port = 0;
    if (family == AF_INET6) handle.address.v6.sin6_port = 0;
    int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0) set(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, SECONDS_TO_GREET);  /* silent sockets wait in the kernel */
    if (fd < 0 || bind(fd, &handle.address.any, family == AF_INET ? sizeof handle.address.v4 : size) ||
        listen(fd, SOMAXCONN) || getsockname(fd, &handle.address.any, &size) || !(l = calloc(1, sizeof *l))) {
        SAY(LOG_WARN, "cannot listen on %s: %s", devices[device].name, strerror(errno));
        if (fd >= 0) close(fd);
        return system_error;
    }
    l->fd = fd;
    l->key = handle.key;
    memset(opaque, 0, HANDLE_BYTES);
    memcpy(opaque, &handle, sizeof handle);
    *out = l;
    return success;
}

static result close_listen(void *argument) {
    struct listener *l = argument;
    for (int i = 0; i < l->guests; i++) close(l->guest[i].fd);
    close(l->fd);
    free(l);
    return success;
}

static void dismiss(struct listener *l, int i) {
    l->silent -= !l->guest[i].greeted;
    close(l->guest[i].fd);
    memmove(&l->guest[i], &l->guest[i + 1], (size_t)(--l->guests - i) * sizeof *l->guest);
}

static bool is_expected(const struct listener *l, const struct hello *hello) {
    if (hello->magic != MAGIC || hello->key != l->key) return false;
    if (hello->streams < 1 || hello->streams > MOST_STREAMS || hello->stream >= hello->streams) return false;
    if (l->guests - l->silent == MOST_GREETED) return false;
    for (int i = 0; i < l->guests; i++) {
        const struct guest *g = &l->guest[i];
        if (!g->greeted || g->hello.connection != hello->connection) continue;
        if (g->hello.stream == hello->stream || g->hello.streams != hello->streams) return false;
    }
    return true;
}

/* Read the hellos of guests; dismiss strangers. It is an error if a peer closes before all its streams have come. */
static result greet(struct listener *l) {
    for (int i = 0; i < l->guests;) {
        struct guest *g = &l->guest[i];
        struct hello hello;
        int got = g->greeted ? read_whole(g->fd, &(char){0}, 1) : read_whole(g->fd, &hello, sizeof hello);
        if (g->greeted && got) {
            SAY(LOG_WARN, "a peer left while it connected");
            return remote_error;
        }
        if (got < 0 || (got > 0 && !is_expected(l, &hello))) {
            SAY(LOG_INFO, "refused a connection that was not meant for this listener");
            dismiss(l, i);
            continue;
        }
        if (got > 0) {
            g->hello = hello;
            g->greeted = true;
            l->silent--;
            prepare(g->fd);
        }
        i++;
    }
    return success;
}

/* Return whether there is room for another silent guest; if need be, close the guest that has been silent longest. */
static bool make_room(struct listener *l) {
    int i = 0;
    if (l->silent < MOST_SILENT) return true;
    while (l->guest[i].greeted) i++;
    if (now() - l->guest[i].came <= SECONDS_TO_GREET) return false;
    dismiss(l, i);
    return true;
}

/* Accept waiting sockets and read their hellos, until none waits, there is no room, or 16 rounds are over. Sockets not
 * accepted stay in the system's queue. Return an error of `greet`; set `why` to 0, or the errno of a failed accept. */
static result let_in(struct listener *l, int *why) {
    int fd = 0;
    *why = 0;
    for (int rounds = 0; rounds < 16; rounds++) {
        while (l->silent < MOST_SILENT && (fd = accept4(l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
            l->guest[l->guests++] = (struct guest){.fd = fd, .came = now()};
            l->silent++;
        }
        if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) *why = errno;
        result error = greet(l);
        if (error || fd < 0 || !make_room(l)) return error;
    }
    return success;
}

/* Take the sockets of a connection whose streams have all greeted. Return the number of sockets; 0 if there is none. */
static int gather(struct listener *l, int *sockets, uint64_t *connection) {
    for (int i = 0; i < l->guests; i++) {
        if (!l->guest[i].greeted) continue;
        uint32_t streams = l->guest[i].hello.streams, come = 0;
        *connection = l->guest[i].hello.connection;
        for (int j = 0; j < l->guests; j++) {
            const struct guest *g = &l->guest[j];
            if (!g->greeted || g->hello.connection != *connection) continue;
            sockets[g->hello.stream] = g->fd;
            come++;
        }
        if (come < streams) continue;
        int kept = 0;
        for (int j = 0; j < l->guests; j++)
            if (!l->guest[j].greeted || l->guest[j].hello.connection != *connection) l->guest[kept++] = l->guest[j];
        l->guests = kept;
        return (int)streams;
    }
    return 0;
}

static result accept_one(void *argument, void **receiver, void **offloaded) {
    struct listener *l = argument;
    struct welcome welcome = {.magic = MAGIC};
    int sockets[MOST_STREAMS];
    (void)offloaded;
    *receiver = NULL;
    int full;
    result error = let_in(l, &full);
    if (error) return error;
    if (full) {
        SAY(LOG_WARN, "a connection cannot be accepted: %s", strerror(full));
        return system_error;
    }
    int streams = gather(l, sockets, &welcome.connection);
    if (!streams) return success;
    /* Ignore a welcome that cannot be written: the peer is gone, and the thread of the stream will report it. */
    for (int i = 0; i < streams; i++) write_whole(sockets[i], &welcome, sizeof welcome);
    *receiver = open_connection(sockets, streams, false);
    return *receiver ? success : system_error;
}

/* A connection that is not established yet. NCCL calls `connect` with the same handle until it is. Each call finds the
 * dial by the handle's address in memory and its key. So no pointer is ever taken from data that a peer has sent. */
struct dial {
    struct dial *next;
    const void *handle;
    uint64_t key, connection;
    int streams;
    enum { CALLING, GREETED, MET } at[MOST_STREAMS];
    int fd[MOST_STREAMS];
};

static struct dial *dials;
static pthread_mutex_t dialing = PTHREAD_MUTEX_INITIALIZER;

static void hang_up(struct dial *d) {
    for (int i = 0; i < d->streams; i++)
        if (d->fd[i] >= 0) close(d->fd[i]);
    free(d);
}

static struct dial *take_dial(const void *opaque, uint64_t key) {
    struct dial *d = NULL;
    pthread_mutex_lock(&dialing);
    for (struct dial **at = &dials; *at && !d; at = d ? at : &(*at)->next)
        if ((*at)->handle == opaque && (*at)->key == key) {
            d = *at;
            *at = d->next;
        }
    pthread_mutex_unlock(&dialing);
    return d;
}

static void keep_dial(struct dial *d) {
    pthread_mutex_lock(&dialing);
    d->next = dials;
    dials = d;
    pthread_mutex_unlock(&dialing);
}

/* Begin to connect all streams; return 0 or an errno. */
static int call(struct dial *d, const void *opaque, const struct handle *handle) {
    d->handle = opaque;
    d->key = handle->key;
    d->connection = draw();
    d->streams = (int)settings.streams;
    for (int i = 0; i < d->streams; i++) d->fd[i] = -1;
    for (int i = 0; i < d->streams; i++) {
        int family = handle->address.any.sa_family;
        d->fd[i] = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (d->fd[i] < 0) return errno;
        prepare(d->fd[i]);
        socklen_t size = family == AF_INET ? sizeof handle->address.v4 : sizeof handle->address.v6;
        if (connect(d->fd[i], &handle->address.any, size) && errno != EINPROGRESS) return errno;
    }
    return 0;
}

/* Send the hello of a stream, or read its welcome, if possible without waiting; return 0 or an errno. */
static int advance(struct dial *d, int i) {
    if (d->at[i] == CALLING) {
        struct hello hello = {MAGIC, d->key, d->connection, (uint32_t)i, (uint32_t)d->streams};
        struct pollfd ready = {.fd = d->fd[i], .events = POLLOUT};
        int error = 0;
        if (poll(&ready, 1, 0) < 1) return 0;
        getsockopt(d->fd[i], SOL_SOCKET, SO_ERROR, &error, &(socklen_t){sizeof error});
        if (error) return error;
        if (!write_whole(d->fd[i], &hello, sizeof hello)) return ECONNRESET;
        d->at[i] = GREETED;
    }
    if (d->at[i] == GREETED) {
        struct welcome welcome;
        int got = read_whole(d->fd[i], &welcome, sizeof welcome);
        if (got < 0) return -got;
        if (got && (welcome.magic != MAGIC || welcome.connection != d->connection)) return EPROTO;
        if (got) d->at[i] = MET;
    }
    return 0;
}

static result connect_to(int device, void *opaque, void **sender, void **offloaded) {
    struct handle handle;
    char text[NI_MAXHOST + NI_MAXSERV];
    (void)offloaded;
    *sender = NULL;
    memcpy(&handle, opaque, sizeof handle);
    int family = handle.address.any.sa_family;
    if (device < 0 || device >= device_count || handle.magic != MAGIC || (family != AF_INET && family != AF_INET6)) {
        SAY(LOG_WARN, "device %d of %d cannot connect: the handle is not of this plugin", device, device_count);
        return invalid_argument;
    }
    int error = 0;
    struct dial *d = take_dial(opaque, handle.key);
    if (!d) {
        if (!(d = calloc(1, sizeof *d))) return system_error;
        error = call(d, opaque, &handle);
    }
    int met = 0;
    for (int i = 0; i < d->streams && !error; i++) {
        error = advance(d, i);
        met += d->at[i] == MET;
    }
    if (error) {
        SAY(LOG_WARN, "no connection to %s: %s", text_of(&handle.address, text), strerror(error));
        hang_up(d);
        return error == EMFILE || error == ENFILE || error == ENOMEM ? system_error : remote_error;
    }
    if (met < d->streams) {
        keep_dial(d);
        return success;
    }
    static atomic_flag said = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&said))  /* needed because NCCL falls back to its sockets silently */
        fprintf(stderr, "baguanet: NCCL sends over this plugin, by %s\n", devices[device].name);
    *sender = open_connection(d->fd, d->streams, true);
    free(d);
    return *sender ? success : system_error;
}

/* ---- Requests ---- */

/* Return the next request of a connection, or NULL if all slots are used: then NCCL calls again. */
static struct request *post_locked(struct connection *c, void *data, size_t size) {
    struct request *r = &c->requests[c->posted % SLOTS];
    if (r->used) return NULL;
    r->connection = c;
    r->message = c->posted++;
    r->data = data;
    r->size = size;
    r->claimed = r->moved = r->span_count = 0;
    r->used = true;
    r->known = false;
    atomic_store(&r->done, false);
    return r;
}

static result isend(void *sender, void *data, size_t size, void **request) {
    struct connection *c = sender;
    *request = NULL;
    if (size > INT_MAX) {  /* `test` returns the size as an int */
        SAY(LOG_WARN, "a message of %zu bytes is more than the %d that one may have", size, INT_MAX);
        return invalid_argument;
    }
    pthread_mutex_lock(&c->mutex);
    result error = (result)atomic_load(&c->error);
    if (!error && (*request = post_locked(c, data, size))) {
        if (size > settings.chunk)
            pthread_cond_broadcast(&c->posting);
        else
            pthread_cond_signal(&c->posting);
    }
    pthread_mutex_unlock(&c->mutex);
    return error;
}

static result irecv(void *receiver, int n, void *data, size_t size, void **request) {
    struct connection *c = receiver;
    *request = NULL;
    if (n != 1) {
        SAY(LOG_WARN, "%d receives in one: this plugin takes 1, as its properties say", n);
        return invalid_argument;
    }
    pthread_mutex_lock(&c->mutex);
    result error = (result)atomic_load(&c->error);
    if (!error && (*request = post_locked(c, data, size))) {
        pthread_cond_broadcast(&c->posting);
        settle_locked(c);
    }
    pthread_mutex_unlock(&c->mutex);
    return error;
}

/* Report a failed request only when no stream uses its data any more, so that the caller may free the data. */
static result test(void *argument, int *done, int *sizes) {
    struct request *r = argument;
    struct connection *c = r->connection;
    result error = success;
    *done = 0;
    if (!atomic_load(&r->done) && !atomic_load(&c->error)) return success;
    pthread_mutex_lock(&c->mutex);
    if (atomic_load(&r->done)) {
        *done = 1;
        if (sizes) *sizes = (int)r->size;
        r->used = false;
    } else if (!r->busy) {
        error = (result)atomic_load(&c->error);
        r->used = false;
    }
    pthread_mutex_unlock(&c->mutex);
    return error;
}

static result iflush(void *receiver, int n, void **data, int *sizes, void **regions, void **request) {
    (void)receiver, (void)n, (void)data, (void)sizes, (void)regions;
    *request = NULL;  /* data in host memory needs no flush */
    return success;
}

struct region {
    char *data;
    size_t size;
};

static result register_memory(void *connection, void *data, size_t size, int type, void **out) {
    struct region *region;
    (void)connection;
    *out = NULL;
    if (type != HOST_MEMORY) {
        SAY(LOG_WARN, "memory of type %d cannot be sent: this plugin takes host memory, as its properties say", type);
        return invalid_argument;
    }
    if (!(region = malloc(sizeof *region))) return system_error;
    *region = (struct region){data, size};
    *out = region;
    return success;
}

/* NCCL frees a buffer when it is deregistered, before it closes the connection. After an abort, requests may still use
 * the buffer. No byte may be written to it later, so fail the connection and wait until no stream uses the buffer. */
static result deregister_memory(void *connection, void *argument) {
    struct connection *c = connection;
    struct region *region = argument;
    if (!region) return success;
    pthread_mutex_lock(&c->mutex);
    for (int i = 0; i < SLOTS; i++) {
        struct request *r = &c->requests[i];
        bool inside = (uintptr_t)r->data - (uintptr_t)region->data < region->size;
        if (!r->used || atomic_load(&r->done) || !inside) continue;
        fail_locked(c, internal_error, "memory was deregistered under message %llu", (unsigned long long)r->message);
        while (r->busy) pthread_cond_wait(&c->leaving, &c->mutex);
    }
    pthread_mutex_unlock(&c->mutex);
    free(region);
    return success;
}

static result close_either(void *connection) {
    close_connection(connection);
    return success;
}

/* ---- The two tables of functions that NCCL looks up ---- */

static result start(log_function log) {
    pthread_mutex_lock(&setup);
    result error = success;
    if (!users) {
        logger = log;
        bool good = setting("BAGUANET_STREAMS", 4, 1, MOST_STREAMS, &settings.streams) &&
                    setting("BAGUANET_CHUNK", 1 << 17, LEAST_CHUNK, 1 << 30, &settings.chunk) &&
                    setting("BAGUANET_PACING", 0, 0, UINT64_MAX, &settings.pacing) &&
                    setting("BAGUANET_TIMEOUT", 120, 0, 1 << 20, &settings.timeout);
        error = good ? find_all_devices() : invalid_usage;
        for (int i = 0; i < device_count && !error; i++)
            SAY(LOG_INFO, "device %d is %s, of %llu streams a connection", i, devices[i].name,
                (unsigned long long)settings.streams);
    }
    users += !error;
    pthread_mutex_unlock(&setup);
    return error;
}

static result finalize(void *context) {
    (void)context;
    pthread_mutex_lock(&setup);
    bool last = users > 0 && !--users;
    pthread_mutex_unlock(&setup);
    pthread_mutex_lock(&dialing);
    while (last && dials) {
        struct dial *d = dials;
        dials = d->next;
        hang_up(d);
    }
    pthread_mutex_unlock(&dialing);
    return success;
}

static result count_devices(int *count) {
    *count = device_count;
    return success;
}

static result properties_v11(int device, struct properties_v11 *p) {
    if (device < 0 || device >= device_count) return invalid_argument;
    *p = (struct properties_v11){
        .name = devices[device].name,
        .pci_path = devices[device].pci_path,
        .guid = (uint64_t)device,
        .memory = HOST_MEMORY,
        .megabits = megabits(&devices[device]),
        .connections = 65536,
        .receives_grouped = 1,
        .fused = {.count = 1, .devices = {device}},
        .largest_message = 1 << 30,
        .largest_collective = 1 << 29,
        .requests_in_one = 1,
    };
    return success;
}

static result properties_v8(int device, struct properties_v8 *p) {
    struct properties_v11 all;
    result error = properties_v11(device, &all);
    if (!error)
        *p = (struct properties_v8){.name = all.name,
                                    .pci_path = all.pci_path,
                                    .guid = all.guid,
                                    .memory = all.memory,
                                    .megabits = all.megabits,
                                    .connections = all.connections,
                                    .receives_grouped = all.receives_grouped};
    return error;
}

static result isend_v8(void *sender, void *data, int size, int tag, void *region, void **request) {
    (void)tag, (void)region;
    return isend(sender, data, (size_t)size, request);
}

static result irecv_v8(void *receiver, int n, void **data, int *sizes, int *tags, void **regions, void **request) {
    (void)tags, (void)regions;
    return irecv(receiver, n, data[0], (size_t)sizes[0], request);
}

static result init_v11(void **context, uint64_t communicator, void *options, log_function log, void *profiler) {
    (void)communicator, (void)options, (void)profiler;
    *context = NULL;
    return start(log);
}

static result listen_v11(void *context, int device, void *handle, void **listener) {
    (void)context;
    return listen_on(device, handle, listener);
}

static result connect_v11(void *context, int device, void *handle, void **sender, void **offloaded) {
    (void)context;
    return connect_to(device, handle, sender, offloaded);
}

static result isend_v11(void *sender, void *data, size_t size, int tag, void *region, void *profile, void **request) {
    (void)tag, (void)region, (void)profile;
    return isend(sender, data, size, request);
}

static result irecv_v11(void *receiver, int n, void **data, size_t *sizes, int *tags, void **regions, void **profiles,
                        void **request) {
    (void)tags, (void)regions, (void)profiles;
    return irecv(receiver, n, data[0], sizes[0], request);
}

static result attributes(void *context, void *given) {
    (void)context, (void)given;
    return success;
}

#define EXPORTED __attribute__((visibility("default")))

EXPORTED extern const struct net_v8 ncclNetPlugin_v8;
EXPORTED extern const struct net_v11 ncclNetPlugin_v11;

const struct net_v8 ncclNetPlugin_v8 = {
    .name = "baguanet",
    .init = start,
    .devices = count_devices,
    .properties = properties_v8,
    .listen = listen_on,
    .connect = connect_to,
    .accept = accept_one,
    .register_memory = register_memory,
    .deregister_memory = deregister_memory,
    .isend = isend_v8,
    .irecv = irecv_v8,
    .iflush = iflush,
    .test = test,
    .close_send = close_either,
    .close_receive = close_either,
    .close_listen = close_listen,
};

const struct net_v11 ncclNetPlugin_v11 = {
    .name = "baguanet",
    .init = init_v11,
    .devices = count_devices,
    .properties = properties_v11,
    .listen = listen_v11,
    .connect = connect_v11,
    .accept = accept_one,
    .register_memory = register_memory,
    .deregister_memory = deregister_memory,
    .isend = isend_v11,
    .irecv = irecv_v11,
    .iflush = iflush,
    .test = test,
    .close_send = close_either,
    .close_receive = close_either,
    .close_listen = close_listen,
    .finalize = finalize,
    .attributes = attributes,
};
