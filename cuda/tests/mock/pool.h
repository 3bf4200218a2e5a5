// The part of driver.c that is what a pool holds for later: what was freed on a stream, for those who come behind that.
//
// A stream uses again what was freed on it. Another one does where it is known to come later (uses.h): it has waited for an event behind the
// free, itself or by way of other streams, or the host has waited. Everything else is taken from the device anew. The real driver may also
// find that a free was carried out already, or make one stream wait for the other; a program that counts on it is slower or larger by chance.
typedef struct Chunk { uint64_t bytes; Point freed; struct Chunk *next; } Chunk;

// Takes what who has seen that may use again, or whatever there is, and says how much of `bytes` that was.
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
