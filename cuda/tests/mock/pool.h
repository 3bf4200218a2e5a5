// The part of driver.c that is what a pool holds for later: what was freed on a stream, for those who come behind that.
//
// A stream uses again what was freed on it. Another one does where it is known to come later: it has waited for an event behind the free, itself
// or by way of other streams, or the host has waited. Everything else is taken from the device anew. The real driver may also find that a
// free was carried out already, or make one stream wait for the other; a program that counts on it is slower or larger by chance.
typedef struct { long stream, epoch; } Known;
// Of a stream: events and waits of the host end an epoch, and what is known comes before everything that is put on the stream now.
typedef struct { long stream, epoch; int frees, count; Known *known; } Order;
typedef struct Chunk { uint64_t bytes; long stream, epoch; struct Chunk *next; } Chunk;
static pthread_mutex_t order_lock = PTHREAD_MUTEX_INITIALIZER;
static Order host; // what has been waited for

static void learn(Order *to, Known news) {
    for (int i = 0; i < to->count; i++) {
        if (to->known[i].stream != news.stream) continue;
        if (to->known[i].epoch < news.epoch) to->known[i].epoch = news.epoch;
        return;
    }
    to->known = realloc(to->known, (to->count + 1) * sizeof news);
    to->known[to->count++] = news;
}
static void learn_all(Order *to, const Order *from) {
    pthread_mutex_lock(&order_lock);
    // Who has freed nothing says nothing.
    if (from->frees) learn(to, (Known){from->stream, from->epoch});
    for (int i = 0; i < from->count; i++) if (from->known[i].stream != to->stream) learn(to, from->known[i]);
    pthread_mutex_unlock(&order_lock);
}
// Where a stream is now; what comes later is of another epoch.
static Order mark(Order *of) {
    pthread_mutex_lock(&order_lock);
    Order now = *of;
    now.known = memcpy(malloc(now.count * sizeof(Known) + 1), of->known ? (void *)of->known : "", now.count * sizeof(Known));
    of->epoch++;
    pthread_mutex_unlock(&order_lock);
    return now;
}
static int knows(const Order *order, const Chunk *chunk) {
    for (int i = 0; i < order->count; i++) {
        if (order->known[i].stream == chunk->stream) return order->known[i].epoch >= chunk->epoch;
    }
    return 0;
}
// Takes what a stream may use again, and says how much of `bytes` that was.
static uint64_t take_chunks(Chunk **chunks, const Order *on, uint64_t bytes) {
    uint64_t taken = 0;
    pthread_mutex_lock(&order_lock);
    for (Chunk **place = chunks; *place && taken < bytes;) {
        Chunk *chunk = *place;
        if (chunk->stream != on->stream && !knows(on, chunk) && !knows(&host, chunk)) { place = &chunk->next; continue; }
        uint64_t more = chunk->bytes < bytes - taken ? chunk->bytes : bytes - taken;
        taken += more;
        chunk->bytes -= more;
        if (!chunk->bytes) { *place = chunk->next; free(chunk); }
    }
    pthread_mutex_unlock(&order_lock);
    return taken;
}
static void keep_chunk(Chunk **chunks, Order *on, uint64_t bytes) {
    pthread_mutex_lock(&order_lock);
    on->frees = 1;
    Chunk **place = chunks;
    while (*place && ((*place)->stream != on->stream || (*place)->epoch != on->epoch)) place = &(*place)->next;
    if (!*place) {
        *place = malloc(sizeof **place);
        **place = (Chunk){0, on->stream, on->epoch, NULL};
    }
    (*place)->bytes += bytes;
    pthread_mutex_unlock(&order_lock);
}
// Gives so much back to the device, of whatever there is.
static uint64_t drop_chunks(Chunk **chunks, uint64_t bytes) {
    uint64_t dropped = 0;
    pthread_mutex_lock(&order_lock);
    while (*chunks && dropped < bytes) {
        Chunk *chunk = *chunks;
        uint64_t more = chunk->bytes < bytes - dropped ? chunk->bytes : bytes - dropped;
        dropped += more;
        chunk->bytes -= more;
        if (!chunk->bytes) { *chunks = chunk->next; free(chunk); }
    }
    pthread_mutex_unlock(&order_lock);
    return dropped;
}
