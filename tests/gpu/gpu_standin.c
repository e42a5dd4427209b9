/* A stand-in for libcudart and libnccl, for machines without a GPU. It is not CUDA and not NCCL.

   Device memory is host memory that other processes can map; a stream is a thread with a queue; an event is a number.
   Communicators are sockets. What matters to the code under test is as in the originals: nothing is done when a call
   returns, streams go on side by side, a receive waits on its stream until its send is there, a group begins as a whole,
   and only after its communicator stopped saying "in progress". */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int delay_us, held_back, version = 22803, last_cuda_error, num_calls_that_wait;
static uint64_t largest;

void standin_delay(int microseconds) { delay_us = microseconds; }
void standin_hold(int is_held) { held_back = is_held; } /* no group goes on until it's 0 again */
void standin_version(int number) { version = number; }
uint64_t standin_largest(void) { return largest; }
int standin_calls_that_wait(void) { return num_calls_that_wait; }

/* Streams and events. */

struct event { long issued, done; };
struct comm;
struct operation { struct comm *comm; int is_send, peer; char *place; size_t nbytes, moved; };
enum kind { COPY, RECORD, WAIT, GROUP };
struct item { enum kind kind; void *into; const void *from; size_t nbytes; struct event *event; long number;
              struct operation *operations; int count; struct item *next; };
struct stream { pthread_t thread; struct item *first, *last; int ends; };

static void run_group(struct comm *comm, struct operation *operations, int count);

static void run(struct item *item) {
  switch (item->kind) {
    case COPY:
      if (delay_us) usleep(delay_us);
      memmove(item->into, item->from, item->nbytes);
      break;
    case GROUP:
      run_group(item->operations[0].comm, item->operations, item->count);
      break;
    case RECORD:
      pthread_mutex_lock(&lock);
      item->event->done = item->number;
      pthread_cond_broadcast(&changed);
      pthread_mutex_unlock(&lock);
      break;
    case WAIT:
      pthread_mutex_lock(&lock);
      while (item->event->done < item->number) pthread_cond_wait(&changed, &lock);
      pthread_mutex_unlock(&lock);
  }
}

static void *serve(void *given) {
  struct stream *stream = given;
  for (;;) {
    pthread_mutex_lock(&lock);
    while (!stream->first && !stream->ends) pthread_cond_wait(&changed, &lock);
    struct item *item = stream->first;
    if (item && !(stream->first = item->next)) stream->last = NULL;
    pthread_mutex_unlock(&lock);
    if (!item) return NULL;
    run(item);
    free(item->operations);
    free(item);
  }
}

static void enqueue(struct stream *stream, struct item made) {
  struct item *item = malloc(sizeof *item);
  *item = made;
  item->next = NULL;
  if (!stream) { run(item); free(item); return; } /* the default stream: the host itself, which is never behind */
  pthread_mutex_lock(&lock);
  if (stream->last) stream->last->next = item; else stream->first = item;
  stream->last = item;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

int cudaStreamCreateWithFlags(void **made, unsigned flags) {
  (void)flags;
  struct stream *stream = calloc(1, sizeof *stream);
  *made = stream;
  return pthread_create(&stream->thread, NULL, serve, stream) ? 999 : 0;
}

int cudaStreamDestroy(void *given) {
  struct stream *stream = given;
  pthread_mutex_lock(&lock);
  stream->ends = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  pthread_join(stream->thread, NULL);
  free(stream);
  return 0;
}

int cudaEventCreateWithFlags(void **made, unsigned flags) { (void)flags; *made = calloc(1, sizeof(struct event)); return 0; }
int cudaEventDestroy(void *event) { free(event); return 0; }

int cudaEventRecord(void *given, void *stream) {
  struct event *event = given;
  pthread_mutex_lock(&lock);
  long number = ++event->issued;
  pthread_mutex_unlock(&lock);
  enqueue(stream, (struct item){.kind = RECORD, .event = event, .number = number});
  return 0;
}

int cudaEventQuery(void *given) {
  struct event *event = given;
  pthread_mutex_lock(&lock);
  int code = event->done == event->issued ? 0 : 600;
  pthread_mutex_unlock(&lock);
  if (code) last_cuda_error = code; /* and it stays, until somebody asks */
  return code;
}

int cudaStreamWaitEvent(void *stream, void *given, unsigned flags) {
  (void)flags;
  struct event *event = given;
  pthread_mutex_lock(&lock);
  long number = event->issued;
  pthread_mutex_unlock(&lock);
  if (stream) enqueue(stream, (struct item){.kind = WAIT, .event = event, .number = number});
  return 0;
}

int cudaMemcpyAsync(void *into, const void *from, size_t nbytes, int kind, void *stream) {
  (void)kind;
  enqueue(stream, (struct item){.kind = COPY, .into = into, .from = from, .nbytes = nbytes});
  return 0;
}

int cudaMemcpy(void *into, const void *from, size_t nbytes, int kind) { (void)kind; memmove(into, from, nbytes); return 0; }

/* Calls that make the host wait for the device: counted, so that a test can see that there are none. */
int cudaDeviceSynchronize(void) { num_calls_that_wait++; return 0; }
int cudaStreamSynchronize(void *stream) { (void)stream; num_calls_that_wait++; return 0; }

int cudaGetLastError(void) { int code = last_cuda_error; last_cuda_error = 0; return code; }
int standin_last_error(void) { return last_cuda_error; }
int cudaRuntimeGetVersion(int *value) { *value = 12080; return 0; }
int cudaGetDevice(int *value) { *value = 0; return 0; }
int cudaSetDevice(int device) { return device ? 101 : 0; }
int cudaDeviceGetPCIBusId(char *text, int size, int device) { snprintf(text, size, "0000:%02x:00.0", device); return 0; }
const char *cudaGetErrorString(int code) {
  return code == 600 ? "not ready" : code == 101 ? "invalid device" : code == 201 ? "invalid handle" : "stand-in error";
}

/* Memory that other processes can map, under the name of this one's descriptor. */

struct handle { uint32_t magic; int32_t pid, fd; uint64_t nbytes; char rest[40]; };
static struct { void *address; size_t nbytes; int fd; } held[4096];

static int hold(void *address, size_t nbytes, int fd) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 4096; i++)
    if (!held[i].address) {
      held[i].address = address, held[i].nbytes = nbytes, held[i].fd = fd;
      pthread_mutex_unlock(&lock);
      return 0;
    }
  pthread_mutex_unlock(&lock);
  return 2;
}

static int let_go(void *address) {
  for (int i = 0; i < 4096; i++)
    if (held[i].address == address) {
      munmap(address, held[i].nbytes);
      if (held[i].fd >= 0) close(held[i].fd);
      held[i].address = NULL;
      return 0;
    }
  return 1;
}

int standin_held(void) { int n = 0; for (int i = 0; i < 4096; i++) n += held[i].address != NULL; return n; }

int cudaMalloc(void **made, size_t nbytes) {
  int fd = memfd_create("gpu-standin", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, nbytes)) return 2;
  *made = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return *made == MAP_FAILED ? 2 : hold(*made, nbytes, fd);
}

int cudaFree(void *address) { return let_go(address); }
int cudaIpcCloseMemHandle(void *address) { return let_go(address); }

int cudaIpcGetMemHandle(struct handle *handle, void *address) {
  memset(handle, 0, sizeof *handle);
  for (int i = 0; i < 4096; i++)
    if (held[i].address == address && held[i].fd >= 0) {
      handle->magic = 0x57414e44, handle->pid = getpid(), handle->fd = held[i].fd, handle->nbytes = held[i].nbytes;
      return 0;
    }
  return 1;
}

int cudaIpcOpenMemHandle(void **made, struct handle handle, unsigned flags) {
  char path[64];
  if (handle.magic != 0x57414e44 || flags != 1) return 201;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return 201;
  *made = mmap(NULL, handle.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return *made == MAP_FAILED ? 201 : hold(*made, handle.nbytes, -1);
}

/* Communicators. */

typedef struct { char internal[128]; } ncclUniqueId;
struct config { size_t size; unsigned magic, version; int blocking; };
struct comm { int rank, size, state, in_progress, aborted, busy; int *sockets; char name[64]; pthread_t maker;
              struct operation *noted; int count; void *stream; };
static __thread struct comm *open_comms[64];
static __thread int num_open, depth;

int ncclGetVersion(int *value) { *value = version; return 0; }

int ncclGetUniqueId(ncclUniqueId *id) {
  unsigned char chance[16];
  memset(id, 0, sizeof *id);
  if (getrandom(chance, sizeof chance, 0) != sizeof chance) return 2;
  for (int i = 0; i < 16; i++) snprintf(id->internal + 2 * i, 3, "%02x", chance[i]);
  return 0;
}

static void address_of(struct comm *comm, int rank, struct sockaddr_un *address, socklen_t *length) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "standin-%s-%d", comm->name, rank);
  *length = offsetof(struct sockaddr_un, sun_path) + 1 + n;
}

static void *make(void *given) {
  struct comm *comm = given;
  struct sockaddr_un address;
  socklen_t length;
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), missing = comm->size - 1 - comm->rank;
  address_of(comm, comm->rank, &address, &length);
  if (bind(listener, (void *)&address, length) || listen(listener, comm->size)) { comm->state = 2; goto out; }
  for (int below = 0; below < comm->rank; below++) {
    int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address_of(comm, below, &address, &length);
    while (connect(made, (void *)&address, length)) {
      if (comm->aborted) { close(made); goto out; }
      usleep(1000);
    }
    if (write(made, &comm->rank, sizeof comm->rank) != sizeof comm->rank) { comm->state = 6; goto out; }
    comm->sockets[below] = made;
  }
  while (missing) {
    struct pollfd waits = {.fd = listener, .events = POLLIN};
    if (comm->aborted) goto out;
    if (poll(&waits, 1, 5) <= 0) continue;
    int above = -1, made = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (read(made, &above, sizeof above) != sizeof above || above <= comm->rank || above >= comm->size) { close(made); continue; }
    comm->sockets[above] = made;
    missing--;
  }
  for (int i = 0; i < comm->size; i++)
    if (comm->sockets[i] >= 0) fcntl(comm->sockets[i], F_SETFL, O_NONBLOCK);
  comm->state = 0;
out:
  close(listener);
  return NULL;
}

int ncclCommInitRankConfig(void **made, int size, ncclUniqueId id, int rank, struct config *config) {
  if (config->magic != 0xcafebeef || config->blocking != 0 || rank < 0 || rank >= size) return 4;
  struct comm *comm = calloc(1, sizeof *comm);
  comm->rank = rank, comm->size = size, comm->state = 7;
  comm->sockets = malloc(size * sizeof *comm->sockets);
  for (int i = 0; i < size; i++) comm->sockets[i] = -1;
  memcpy(comm->name, id.internal, 32);
  *made = comm;
  return pthread_create(&comm->maker, NULL, make, comm) ? 2 : 7;
}

static void begin(struct comm *comm) {
  struct item item = {.kind = GROUP, .operations = comm->noted, .count = comm->count};
  comm->noted = NULL, comm->count = 0;
  enqueue(comm->stream, item);
}

int ncclCommGetAsyncError(struct comm *comm, int *state) {
  pthread_mutex_lock(&lock);
  int starts = comm->in_progress && !--comm->in_progress;
  *state = comm->state ? comm->state : comm->in_progress ? 7 : 0;
  pthread_mutex_unlock(&lock);
  if (starts) begin(comm);
  return 0;
}

int ncclCommAbort(struct comm *comm) {
  comm->aborted = 1;
  pthread_join(comm->maker, NULL);
  pthread_mutex_lock(&lock);
  while (comm->busy) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  for (int i = 0; i < comm->size; i++)
    if (comm->sockets[i] >= 0) close(comm->sockets[i]), comm->sockets[i] = -1;
  return 0; /* the few bytes of `comm` stay: a group of it may still be on a stream */
}

int ncclGroupStart(void) { depth++; return 0; }

int ncclGroupEnd(void) {
  if (--depth) return depth < 0 ? 5 : 0;
  for (int i = 0; i < num_open; i++) open_comms[i]->in_progress = 3;
  int any = num_open;
  num_open = 0;
  return any ? 7 : 0;
}

static int note(int is_send, void *place, size_t nbytes, int type, int peer, struct comm *comm, void *stream) {
  if (!depth || type != 1 || peer < 0 || peer >= comm->size) return 5;
  if (nbytes > largest) largest = nbytes;
  int known = 0;
  for (int i = 0; i < num_open; i++) known |= open_comms[i] == comm;
  if (!known) open_comms[num_open++] = comm;
  comm->noted = realloc(comm->noted, (comm->count + 1) * sizeof *comm->noted);
  comm->noted[comm->count++] = (struct operation){comm, is_send, peer, place, nbytes, 0};
  comm->stream = stream;
  return 0;
}

int ncclSend(void *place, size_t nbytes, int type, int peer, struct comm *comm, void *stream) {
  return note(1, place, nbytes, type, peer, comm, stream);
}

int ncclRecv(void *place, size_t nbytes, int type, int peer, struct comm *comm, void *stream) {
  return note(0, place, nbytes, type, peer, comm, stream);
}

static int self_copies(struct operation *operations, int count, int rank) {
  int did = 0, in = 0;
  for (int out = 0; out < count; out++) {
    struct operation *send = &operations[out];
    if (!send->is_send || send->peer != rank || (send->nbytes && send->moved)) continue;
    while (in < count && (operations[in].is_send || operations[in].peer != rank)) in++;
    if (in == count) break;
    size_t least = send->nbytes < operations[in].nbytes ? send->nbytes : operations[in].nbytes;
    if (least < 1u << 31) memcpy(operations[in].place, send->place, least); /* greater ones are only counted */
    send->moved = send->nbytes, operations[in].moved = operations[in].nbytes, did = 1, in++;
  }
  return did;
}

static int step(struct comm *comm, struct operation *each) {
  int socket = comm->sockets[each->peer];
  size_t left = each->nbytes - each->moved;
  ssize_t n = each->is_send ? send(socket, each->place + each->moved, left, MSG_NOSIGNAL)
                            : recv(socket, each->place + each->moved, left, 0);
  if (n > 0) each->moved += n;
  if (n == 0 || (n < 0 && errno != EAGAIN)) comm->state = 6;
  return n > 0;
}

static int left_of(struct operation *operations, int count) {
  int left = 0;
  for (int i = 0; i < count; i++) left += operations[i].moved < operations[i].nbytes;
  return left;
}

static void run_group(struct comm *comm, struct operation *operations, int count) {
  pthread_mutex_lock(&lock);
  comm->busy = !comm->aborted;
  pthread_mutex_unlock(&lock);
  while (held_back && !comm->aborted) usleep(1000);
  if (comm->busy && !comm->aborted) self_copies(operations, count, comm->rank);
  while (!comm->aborted && left_of(operations, count)) {
    char taken[2][256] = {{0}}; /* of each peer the oldest send and the oldest receive goes on */
    int did = 0;
    for (int i = 0; i < count && !comm->state; i++) {
      struct operation *each = &operations[i];
      if (each->moved == each->nbytes || taken[each->is_send][each->peer]) continue;
      taken[each->is_send][each->peer] = 1;
      if (each->peer != comm->rank) did |= step(comm, each);
    }
    if (!did) usleep(100);
  }
  pthread_mutex_lock(&lock);
  comm->busy = 0;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

const char *ncclGetErrorString(int code) {
  static const char *words[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                "invalid argument", "invalid usage", "remote process exited", "in progress"};
  return code >= 0 && code < 8 ? words[code] : "unknown";
}

const char *ncclGetLastError(struct comm *comm) { (void)comm; return "said by the stand-in"; }
