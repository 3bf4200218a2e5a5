// The part of driver.c that holds freed pool memory for reuse.
//
// A stream reuses memory that was freed on it. Another stream reuses it only where the order is certain (uses.h): the
// stream has waited for an event after the free, itself or through other streams, or the host has waited. All other
// memory is newly taken from the device. The real driver may also notice that a free has completed, or make one stream
// wait for the other; a program that relies on that has unpredictable speed and memory use.
typedef struct Chunk { uint64_t bytes; Point freed; struct Chunk *next; } Chunk;

// Takes up to `bytes` bytes from the chunks that a caller with this `seen` may reuse (any chunk if `seen` is NULL), and
// returns how many bytes it took.
static uint64_t take_chunks(Chunk **chunks, const Seen *seen, uint64_t bytes) {
    uint64_t taken = 0;
    pthread_mutex_lock(&uses_lock);
    for (Chunk **place = chunks; *place && taken < bytes;) {
        Chunk *chunk = *place;
        if (seen && !has_seen(seen, chunk->freed) && !has_seen(&seen_by_host, chunk->freed)) { place = &chunk->next; continue; }
        uint64_t more = chunk->bytes < bytes - taken ? chunk->bytes : bytes - taken;
        taken += more;
        chunk->bytes -= more;
        if (!chunk->bytes) { *place = chunk->next; free(chunk); }
    }
    pthread_mutex_unlock(&uses_lock);
    return taken;
}
static void keep_chunk(Chunk **chunks, Point freed, uint64_t bytes) {
    pthread_mutex_lock(&uses_lock);
    while (*chunks) chunks = &(*chunks)->next;
    *chunks = malloc(sizeof **chunks);
    **chunks = (Chunk){bytes, freed, NULL};
    pthread_mutex_unlock(&uses_lock);
}
