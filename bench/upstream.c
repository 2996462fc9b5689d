/* An OpenAI-style upstream that needs a few microseconds per request, so that the client's cost is what is measured.
 *
 * One thread, one epoll loop, Linux only. It prints "upstream listens on PORT" and ends with its parent process.
 *
 *   POST anything   answers with a chat completion that repeats the "[line N]" of the request, after the plan's latency
 *   GET /plan?...   sets the plan: latency_ms, and in percent of the attempts internal (500), throttled (429 with
 *                   Retry-After: 1) and cut (the connection is closed halfway); resets all counters
 *   GET /seen       returns the counters
 *
 * The outcome of an attempt depends only on the line and the number of its attempts.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_CONNECTIONS = 32768, MOST_LINES = 1 << 23, MOST_INPUT = 4 << 20, EVENTS = 512, REPLY = 2048 };
enum fate { WHOLE, INTERNAL, THROTTLED, CUT };

static const char FILLER[] =
    "Thank you for the report. The button waits for a file that was never chosen, and says nothing about it. Choose "
    "one first and the export starts; the next release will say so in plain words instead of staying silent.";

struct connection {
    bool open, waiting, last;
    uint32_t life;
    char *input;
    size_t filled, room;
    char output[REPLY];
    size_t unsent, sent;
};

struct pending {
    int fd;
    uint32_t life;
    int64_t line;
    enum fate fate;
    double due;
};

static struct connection connections[MOST_CONNECTIONS];
static uint8_t tries[MOST_LINES];
static bool answered[MOST_LINES];

/* The latency is the same for all requests, so the first is answered first. A connection waits for one answer at most. */
static struct pending queue[MOST_CONNECTIONS];
static uint64_t queue_head, queue_tail;

static struct { double latency, internal, throttled, cut; } plan;

static struct {
    uint64_t requests, answered, internal, throttled, cut, lines, repeated, connections;
    int64_t in_flight, peak_in_flight;
    double first_request, last_answer, cpu;
} seen;

static int poller;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static double cpu_seconds(void) {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
}

static void watch(int fd, int how, uint32_t events) {
    struct epoll_event event = {.events = events, .data.fd = fd};
    epoll_ctl(poller, how, fd, &event);
}

static void hang_up(int fd) {
    struct connection *it = &connections[fd];
    if (it->waiting) seen.in_flight--;
    it->open = it->waiting = false;
    it->life++;
    close(fd);
}

/* Returns false if the connection was closed. */
static bool flush(int fd) {
    struct connection *it = &connections[fd];
    while (it->sent < it->unsent) {
        ssize_t count = send(fd, it->output + it->sent, it->unsent - it->sent, MSG_NOSIGNAL);
        if (count < 0 && errno == EAGAIN) {
            watch(fd, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
            return true;
        }
        if (count < 0) {
            hang_up(fd);
            return false;
        }
        it->sent += (size_t)count;
    }
    it->sent = it->unsent = 0;
    if (it->last) hang_up(fd);
    return it->open;
}

static void reply(int fd, const char *status, const char *header, const char *body, size_t shown) {
    struct connection *it = &connections[fd];
    it->unsent = (size_t)snprintf(it->output, REPLY,
                                  "HTTP/1.1 %s\r\ncontent-type: application/json\r\n%scontent-length: %zu\r\n\r\n%.*s",
                                  status, header, strlen(body), (int)shown, body);
    it->sent = 0;
}

static void refuse(int fd, const char *status, const char *header, const char *code) {
    char body[200];
    snprintf(body, sizeof body,
             "{\"error\":{\"message\":\"as planned\",\"type\":\"%s\",\"param\":null,\"code\":\"%s\"}}", code, code);
    reply(fd, status, header, body, strlen(body));
}

static void complete(int fd, int64_t line, bool whole) {
    char body[1200];
    size_t length = (size_t)snprintf(
        body, sizeof body,
        "{\"id\":\"chatcmpl-%llx\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"bench\","
        "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"[line %lld] %s\","
        "\"refusal\":null},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":56,"
        "\"completion_tokens\":40,\"total_tokens\":96},\"system_fingerprint\":\"fp_bench\"}",
        (unsigned long long)seen.requests, (long long)line, FILLER);
    reply(fd, "200 OK", "", body, whole ? length : length / 2);
}

static void answer(int fd, int64_t line, enum fate fate) {
    seen.in_flight--;
    seen.last_answer = now();
    switch (fate) {
    case INTERNAL:
        seen.internal++;
        refuse(fd, "500 Internal Server Error", "", "server_error");
        return;
    case THROTTLED:
        seen.throttled++;
        refuse(fd, "429 Too Many Requests", "retry-after: 1\r\n", "rate_limit_exceeded");
        return;
    case CUT:
        seen.cut++;
        connections[fd].last = true;
        complete(fd, line, false);
        return;
    case WHOLE:
        seen.answered++;
        if (line >= 0) answered[line] = true;
        complete(fd, line, true);
    }
}

static uint64_t scramble(uint64_t value) {
    value = (value ^ (value >> 33)) * 0xff51afd7ed558ccdULL;
    value = (value ^ (value >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return value ^ (value >> 33);
}

/* With this salt, 5 % of 500s and 1 % of cuts never hit one of the first 280,000 lines four times in a row: a client that
 * makes four attempts must not have a failed line. */
static const uint64_t SALT = (9ULL << 40) + 1;

static enum fate draw(int64_t line, uint8_t try) {
    uint64_t which = line < 0 ? seen.requests : (uint64_t)line;
    double ticket = (double)(scramble(which * 256 + try + SALT) >> 11) / (double)(1ULL << 53) * 100;
    if ((ticket -= plan.internal) < 0) return INTERNAL;
    if ((ticket -= plan.throttled) < 0) return THROTTLED;
    if ((ticket -= plan.cut) < 0) return CUT;
    return WHOLE;
}

static int64_t line_of(const char *body, size_t length) {
    static const char MARK[] = "[line ";
    const char *found = memmem(body, length, MARK, sizeof MARK - 1);
    int64_t line = found ? strtoll(found + sizeof MARK - 1, NULL, 10) : -1;
    return line < MOST_LINES ? line : -1;
}

static void take(int fd, const char *body, size_t length) {
    int64_t line = line_of(body, length);
    double time = now();
    uint8_t try = 0;
    if (line >= 0) {
        if (tries[line] == 0) seen.lines++;
        if (answered[line]) seen.repeated++;
        try = tries[line] < UINT8_MAX ? tries[line]++ : UINT8_MAX;
    }
    enum fate fate = draw(line, try);
    if (seen.requests++ == 0) seen.first_request = time;
    if (++seen.in_flight > seen.peak_in_flight) seen.peak_in_flight = seen.in_flight;
    if (plan.latency <= 0) {
        answer(fd, line, fate);
        return;
    }
    connections[fd].waiting = true;
    queue[queue_tail++ % MOST_CONNECTIONS] = (struct pending){fd, connections[fd].life, line, fate, time + plan.latency};
}

static double parameter(const char *query, const char *name) {
    const char *found = strstr(query, name);
    return found ? strtod(found + strlen(name), NULL) : 0;
}

static void follow(const char *query) {
    plan.latency = parameter(query, "latency_ms=") / 1e3;
    plan.internal = parameter(query, "internal=");
    plan.throttled = parameter(query, "throttled=");
    plan.cut = parameter(query, "cut=");
    int64_t in_flight = seen.in_flight;
    memset(&seen, 0, sizeof seen);
    seen.in_flight = seen.peak_in_flight = in_flight;
    seen.cpu = cpu_seconds();
    memset(tries, 0, sizeof tries);
    memset(answered, 0, sizeof answered);
}

static void tell(int fd) {
    char body[1000];
    snprintf(body, sizeof body,
             "{\"requests\":%llu,\"answered\":%llu,\"internal\":%llu,\"throttled\":%llu,\"cut\":%llu,\"lines\":%llu,"
             "\"repeated\":%llu,\"connections\":%llu,\"in_flight\":%lld,\"peak_in_flight\":%lld,"
             "\"first_request\":%.6f,\"last_answer\":%.6f,\"cpu_seconds\":%.6f}",
             (unsigned long long)seen.requests, (unsigned long long)seen.answered, (unsigned long long)seen.internal,
             (unsigned long long)seen.throttled, (unsigned long long)seen.cut, (unsigned long long)seen.lines,
             (unsigned long long)seen.repeated, (unsigned long long)seen.connections, (long long)seen.in_flight,
             (long long)seen.peak_in_flight, seen.first_request, seen.last_answer, cpu_seconds() - seen.cpu);
    reply(fd, "200 OK", "", body, strlen(body));
}

static void look_up(int fd, const char *head) {
    if (!strncmp(head, "GET /plan", 9)) follow(head);
    if (!strncmp(head, "GET /plan", 9) || !strncmp(head, "GET /seen", 9))
        tell(fd);
    else
        refuse(fd, "404 Not Found", "", "not_found_error");
}

/* Serves one request of the input if it has arrived completely; returns its number of bytes. */
static size_t serve_one(int fd) {
    struct connection *it = &connections[fd];
    char *end = memmem(it->input, it->filled, "\r\n\r\n", 4);
    if (!end) return 0;
    *end = 0;
    size_t head = (size_t)(end - it->input) + 4;
    char *field = strcasestr(it->input, "\r\ncontent-length:");
    size_t body = field ? strtoul(field + 17, NULL, 10) : 0;
    if (it->filled < head + body) {
        *end = '\r';
        return 0;
    }
    it->last = strcasestr(it->input, "\r\nconnection: close") != NULL;
    if (!strncmp(it->input, "POST ", 5))
        take(fd, it->input + head, body);
    else
        look_up(fd, it->input);
    return head + body;
}

static void serve(int fd) {
    struct connection *it = &connections[fd];
    while (it->open && !it->waiting && !it->unsent && it->filled) {
        size_t used = serve_one(fd);
        if (!used) return;
        memmove(it->input, it->input + used, it->filled - used);
        it->filled -= used;
        if (it->unsent && !flush(fd)) return;
    }
}

static void receive(int fd) {
    struct connection *it = &connections[fd];
    if (it->room - it->filled < 4096 && it->room < MOST_INPUT) {
        it->room *= 2;
        it->input = realloc(it->input, it->room);
    }
    ssize_t count = recv(fd, it->input + it->filled, it->room - it->filled, 0);
    if (count == 0 || (count < 0 && errno != EAGAIN)) {
        hang_up(fd);
        return;
    }
    if (count > 0) {
        it->filled += (size_t)count;
        serve(fd);
    }
}

static void welcome(int listener) {
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        if (fd >= MOST_CONNECTIONS) {
            close(fd);
            continue;
        }
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct connection *it = &connections[fd];
        if (!it->input) it->input = malloc(it->room = 16384);
        it->open = true;
        it->waiting = it->last = false;
        it->filled = it->unsent = it->sent = 0;
        seen.connections++;
        watch(fd, EPOLL_CTL_ADD, EPOLLIN);
    }
}

static void answer_the_due(void) {
    double time = now();
    while (queue_head != queue_tail && queue[queue_head % MOST_CONNECTIONS].due <= time) {
        struct pending it = queue[queue_head++ % MOST_CONNECTIONS];
        if (!connections[it.fd].open || connections[it.fd].life != it.life) continue;
        connections[it.fd].waiting = false;
        answer(it.fd, it.line, it.fate);
        if (flush(it.fd)) serve(it.fd);
    }
}

static int milliseconds_to_next(void) {
    if (queue_head == queue_tail) return -1;
    double left = queue[queue_head % MOST_CONNECTIONS].due - now();
    return left <= 0 ? 0 : (int)(left * 1e3) + 1;
}

static int listen_somewhere(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) || listen(fd, 4096)) {
        perror("upstream");
        exit(1);
    }
    getsockname(fd, (struct sockaddr *)&address, &size);
    printf("upstream listens on %d\n", ntohs(address.sin_port));
    fflush(stdout);
    return fd;
}

int main(void) {
    static struct epoll_event events[EVENTS];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    int listener = listen_somewhere();
    poller = epoll_create1(0);
    watch(listener, EPOLL_CTL_ADD, EPOLLIN);
    for (;;) {
        int count = epoll_wait(poller, events, EVENTS, milliseconds_to_next());
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) {
                welcome(listener);
                continue;
            }
            if (!connections[fd].open) continue;
            if (events[i].events & EPOLLOUT) {
                watch(fd, EPOLL_CTL_MOD, EPOLLIN);
                if (!flush(fd)) continue;
                serve(fd);
            }
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(fd);
        }
        answer_the_due();
    }
}
