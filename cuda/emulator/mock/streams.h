// The part of driver.c that runs streams and events.
typedef struct Task { void (*run)(void *); void *argument; struct Task *next; } Task;
struct Stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Task *first, *last;
    long begun, done;
    int closed, device, priority, place;
    Seen seen; // visible to its next work; its own entry is the number of its last work
    pthread_t thread;
    struct Stream *next; // in the list of all streams
};
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static Stream *streams;

static void *work(void *argument) {
    Stream *stream = argument;
    current = stream->device;
    pthread_mutex_lock(&stream->lock);
    while (stream->first || !stream->closed) {
        Task *task = stream->first;
        if (!task) { pthread_cond_wait(&stream->changed, &stream->lock); continue; }
        pthread_mutex_unlock(&stream->lock);
        task->run(task->argument);
        pthread_mutex_lock(&stream->lock);
        stream->first = task->next;
        if (!stream->first) stream->last = NULL;
        stream->done++;
        free(task);
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}
static Stream *begin_stream(int device) {
    Stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    stream->device = device;
    take_place(&stream->place, &stream->seen);
    if (pthread_create(&stream->thread, NULL, work, stream)) { free(stream); return NULL; }
    pthread_mutex_lock(&streams_lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&streams_lock);
    return stream;
}
// Resolves a handle: the default stream of the current device, the default stream of this thread, or the handle itself.
static Stream *stream_of(Stream *handle) {
    static Stream *shared[MOST_DEVICES + 1];
    static __thread Stream *own[MOST_DEVICES + 1];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    if ((uintptr_t)handle > 2) return handle;
    Stream **stream = (uintptr_t)handle == 2 ? &own[current] : &shared[current];
    pthread_mutex_lock(&lock);
    if (!*stream) *stream = begin_stream(current);
    pthread_mutex_unlock(&lock);
    return *stream;
}
static const Seen *seen_by(Stream *handle) { return &stream_of(handle)->seen; }
static Point next_on(Stream *handle) {
    Stream *stream = stream_of(handle);
    return (Point){stream->place, stream->seen.at[stream->place] + 1};
}
void mock_enqueue(Stream *handle, void (*run)(void *), void *argument) {
    Stream *stream = stream_of(handle);
    Task *task = malloc(sizeof *task);
    *task = (Task){run, argument, NULL};
    number_next(stream->place, &stream->seen);
    pthread_mutex_lock(&stream->lock);
    if (stream->last) stream->last->next = task; else stream->first = task;
    stream->last = task;
    stream->begun++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}
void mock_use(Stream *handle, const void *address) {
    Stream *stream = stream_of(handle);
    piece_is_used(address, stream->place, &stream->seen);
}
static void allocated(Stream *handle, const char *start, size_t bytes) {
    Stream *stream = stream_of(handle);
    piece_begins(start, bytes, stream->place, &stream->seen);
}
static void freed(Stream *handle, const char *start) { piece_ends(start, &stream_of(handle)->seen); }
static void wait_for(Stream *stream) {
    Seen *seen = copy_of(&stream->seen);
    pthread_mutex_lock(&stream->lock);
    long until = stream->begun;
    while (stream->done < until) pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    host_sees(seen);
}
// Priorities range from LEAST to GREATEST; the real driver also clamps other values to this range.
enum { LEAST = 0, GREATEST = -5 };
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { NEEDS_CONTEXT; *least = LEAST; *greatest = GREATEST; return 0; }
int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    NEEDS_CONTEXT;
    if (flags != 1) return INVALID_VALUE; // only non-blocking streams
    *stream = begin_stream(current);
    if (!*stream) return OUT_OF_MEMORY;
    (*stream)->priority = priority > LEAST ? LEAST : priority < GREATEST ? GREATEST : priority;
    return 0;
}
int cuStreamCreate(Stream **stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }
int cuStreamGetPriority(Stream *stream, int *priority) { NEEDS_CONTEXT; *priority = stream_of(stream)->priority; return 0; }
static void *bury(void *argument) {
    Stream *stream = argument;
    pthread_join(stream->thread, NULL);
    free(stream);
    return NULL;
}
// Work that is still on the stream finishes in the background.
int cuStreamDestroy_v2(Stream *stream) {
    pthread_mutex_lock(&streams_lock);
    for (Stream **place = &streams; *place; place = &(*place)->next) {
        if (*place == stream) { *place = stream->next; break; }
    }
    pthread_mutex_unlock(&streams_lock);
    leave_place(stream->place, &stream->seen);
    pthread_mutex_lock(&stream->lock);
    stream->closed = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return start_detached(bury, stream) ? OUT_OF_MEMORY : 0;
}
int cuStreamQuery(Stream *handle) {
    NEEDS_CONTEXT;
    COUNT(queries, 1);
    NEEDS_HEALTH;
    Stream *stream = stream_of(handle);
    Seen *seen = copy_of(&stream->seen);
    pthread_mutex_lock(&stream->lock);
    int done = stream->done == stream->begun;
    pthread_mutex_unlock(&stream->lock);
    done ? host_sees(seen) : free(seen);
    return done ? 0 : NOT_READY;
}
static int synchronize(Stream *handle) {
    NEEDS_CONTEXT;
    wait_for(stream_of(handle));
    release_reserved();
    NEEDS_HEALTH;
    return 0;
}
int cuStreamSynchronize(Stream *handle) {
    COUNT_WAIT(stream);
    return synchronize(handle);
}
// Waits for all work on the streams of a device.
static void wait_for_streams(int device) {
    // New streams are added at the front of the list and are not waited for; no stream is removed while the list is
    // locked.
    pthread_mutex_lock(&streams_lock);
    for (Stream *stream = streams; stream; stream = stream->next) if (stream->device == device) wait_for(stream);
    pthread_mutex_unlock(&streams_lock);
}
int cuCtxSynchronize(void) {
    NEEDS_CONTEXT;
    COUNT_WAIT(context);
    wait_for_streams(current);
    release_reserved();
    NEEDS_HEALTH;
    return 0;
}
// Graph capture is not supported.
int cuStreamIsCapturing(Stream *stream, int *status) { (void)stream; *status = 0; return 0; }

typedef struct { void (*call)(void *); void *argument; Seen *seen; } Call;
static void call_host(void *argument) {
    Call *call = argument;
    // The function may signal the host, which then sees all earlier work.
    host_sees(call->seen);
    call->call(call->argument);
    free(call);
}
int cuLaunchHostFunc(Stream *stream, void (*call)(void *), void *argument) {
    NEEDS_CONTEXT;
    Call *job = malloc(sizeof *job);
    *job = (Call){call, argument, copy_of(&stream_of(stream)->seen)};
    mock_enqueue(stream, call_host, job);
    return 0;
}

// An event is a reference-counted moment, shared by those who wait for it; recording again creates a new one.
typedef struct { pthread_mutex_t lock; pthread_cond_t changed; int happened, holders; struct timespec when; Seen *seen; } Moment;
typedef struct { pthread_mutex_t lock; Moment *moment; int timed; } Event;
static void let_go(Moment *moment) {
    pthread_mutex_lock(&moment->lock);
    int last = --moment->holders == 0;
    pthread_mutex_unlock(&moment->lock);
    if (last) free(moment->seen), free(moment);
}
static void happen(void *argument) {
    Moment *moment = argument;
    pthread_mutex_lock(&moment->lock);
    moment->happened = 1;
    clock_gettime(CLOCK_MONOTONIC, &moment->when);
    pthread_cond_broadcast(&moment->changed);
    pthread_mutex_unlock(&moment->lock);
    let_go(moment);
}
static void await(void *argument) {
    Moment *moment = argument;
    pthread_mutex_lock(&moment->lock);
    while (!moment->happened) pthread_cond_wait(&moment->changed, &moment->lock);
    pthread_mutex_unlock(&moment->lock);
    let_go(moment);
}
static Moment *hold(Event *event) {
    pthread_mutex_lock(&event->lock);
    Moment *moment = event->moment;
    if (moment) {
        pthread_mutex_lock(&moment->lock);
        moment->holders++;
        pthread_mutex_unlock(&moment->lock);
    }
    pthread_mutex_unlock(&event->lock);
    return moment;
}
int cuEventCreate(Event **event, unsigned flags) {
    NEEDS_CONTEXT;
    *event = calloc(1, sizeof **event);
    (*event)->timed = !(flags & 2);
    pthread_mutex_init(&(*event)->lock, NULL);
    return 0;
}
int cuEventRecord(Event *event, Stream *stream) {
    NEEDS_CONTEXT;
    COUNT(records, 1);
    Moment *moment = calloc(1, sizeof *moment);
    pthread_mutex_init(&moment->lock, NULL);
    pthread_cond_init(&moment->changed, NULL);
    moment->holders = 2;
    moment->seen = copy_of(&stream_of(stream)->seen);
    pthread_mutex_lock(&event->lock);
    Moment *before = event->moment;
    event->moment = moment;
    pthread_mutex_unlock(&event->lock);
    if (before) let_go(before);
    mock_enqueue(stream, happen, moment);
    return 0;
}
int cuEventQuery(Event *event) {
    COUNT(queries, 1);
    NEEDS_HEALTH;
    Moment *moment = hold(event);
    if (!moment) return 0;
    pthread_mutex_lock(&moment->lock);
    int happened = moment->happened;
    pthread_mutex_unlock(&moment->lock);
    if (happened) see_also(&seen_by_host, moment->seen);
    let_go(moment);
    return happened ? 0 : NOT_READY;
}
int cuEventSynchronize(Event *event) {
    COUNT_WAIT(event);
    Moment *moment = hold(event);
    if (moment) {
        Seen *seen = copy_of(moment->seen);
        await(moment);
        host_sees(seen);
    }
    NEEDS_HEALTH;
    return 0;
}
int cuEventElapsedTime(float *milliseconds, Event *start, Event *end) {
    if (!start->timed || !end->timed) return INVALID_HANDLE;
    Moment *from = hold(start), *to = hold(end);
    int both = from && to, happened = both && from->happened && to->happened;
    if (happened) *milliseconds = (to->when.tv_sec - from->when.tv_sec) * 1e3 + (to->when.tv_nsec - from->when.tv_nsec) / 1e6;
    if (from) let_go(from);
    if (to) let_go(to);
    return happened ? 0 : both ? NOT_READY : INVALID_HANDLE;
}
int cuEventElapsedTime_v2(float *milliseconds, Event *start, Event *end) { return cuEventElapsedTime(milliseconds, start, end); }
int cuEventDestroy_v2(Event *event) {
    if (event->moment) let_go(event->moment);
    free(event);
    return 0;
}
int cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    NEEDS_CONTEXT;
    (void)flags;
    COUNT(event_waits, 1);
    Moment *moment = hold(event);
    if (!moment) return 0;
    see_also(&stream_of(stream)->seen, moment->seen);
    mock_enqueue(stream, await, moment);
    return 0;
}
