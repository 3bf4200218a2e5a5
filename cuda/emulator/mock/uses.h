// The part of driver.c that tracks which work uses which memory, and how work is ordered: by the stream that it is on,
// by events, or because the host has waited.
//
// It reports memory that is used or freed on a stream that is not ordered after its allocation, memory that is freed on
// a stream that is not ordered after a use on another stream, and memory that is used after it was freed. It reports
// these faults whether or not they did harm this time.
enum { MOST_STREAMS = 1024 };
// Work is numbered within its stream. `at` has, for each stream, the number of the last work known to be done before.
typedef struct { int count; long at[MOST_STREAMS]; } Seen;
typedef struct { int place; long number; } Point;
// The last work on a stream that used a piece.
typedef struct Use { Point point; struct Use *next; } Use;
// A piece of device memory or of pinned memory; `since` is the point of its allocation.
typedef struct { const char *start; size_t bytes; int is_free; Point since; Use *uses; } Piece;

static pthread_mutex_t uses_lock = PTHREAD_MUTEX_INITIALIZER;
static Seen seen_by_host;
// A new stream takes the place of a closed one and continues its numbering.
static long last_numbers[MOST_STREAMS];
static int places, free_places[MOST_STREAMS], free_count;
static Piece **pieces; // by address
static size_t piece_count, piece_room;

static void see(Seen *to, const Seen *from) {
    for (int i = 0; i < from->count; i++) if (from->at[i] > to->at[i]) to->at[i] = from->at[i];
    if (from->count > to->count) to->count = from->count;
}
static int has_seen(const Seen *seen, Point point) { return point.number <= seen->at[point.place]; }
// A copy of what is seen now, no larger than necessary.
static Seen *copy_of(const Seen *of) {
    pthread_mutex_lock(&uses_lock);
    size_t bytes = offsetof(Seen, at) + of->count * sizeof *of->at;
    Seen *copy = memcpy(malloc(bytes), of, bytes);
    pthread_mutex_unlock(&uses_lock);
    return copy;
}
static void see_also(Seen *to, const Seen *from) {
    pthread_mutex_lock(&uses_lock);
    see(to, from);
    pthread_mutex_unlock(&uses_lock);
}
static void host_sees(Seen *of) {
    see_also(&seen_by_host, of);
    free(of);
}
static void take_place(int *place, Seen *seen) {
    pthread_mutex_lock(&uses_lock);
    if (!free_count && places == MOST_STREAMS) { fprintf(stderr, "mock: too many streams\n"); abort(); }
    *place = free_count ? free_places[--free_count] : places++;
    seen->count = *place + 1;
    seen->at[*place] = last_numbers[*place];
    pthread_mutex_unlock(&uses_lock);
}
static void leave_place(int place, const Seen *seen) {
    pthread_mutex_lock(&uses_lock);
    last_numbers[place] = seen->at[place];
    free_places[free_count++] = place;
    pthread_mutex_unlock(&uses_lock);
}
// Numbers one more piece of work, which comes after everything that the host has waited for.
static void number_next(int place, Seen *seen) {
    pthread_mutex_lock(&uses_lock);
    see(seen, &seen_by_host);
    seen->at[place]++;
    pthread_mutex_unlock(&uses_lock);
}

// Returns the number of pieces that begin at or before an address. The caller holds the lock.
static size_t pieces_before(const void *address) {
    size_t low = 0, high = piece_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (pieces[middle]->start <= (const char *)address) low = middle + 1; else high = middle;
    }
    return low;
}
static Piece *piece_around(const void *address) {
    size_t before = pieces_before(address);
    Piece *piece = before ? pieces[before - 1] : NULL;
    return piece && (const char *)address < piece->start + piece->bytes ? piece : NULL;
}
// Adds a piece allocated by the next work on the stream with this `place` and `seen`; immediately if `seen` is NULL.
static void piece_begins(const char *start, size_t bytes, int place, const Seen *seen) {
    Piece *piece = calloc(1, sizeof *piece);
    pthread_mutex_lock(&uses_lock);
    *piece = (Piece){.start = start, .bytes = bytes, .since = {place, seen ? seen->at[place] + 1 : 0}};
    if (piece_count == piece_room) pieces = realloc(pieces, (piece_room = 2 * piece_room + 64) * sizeof *pieces);
    size_t at = pieces_before(start);
    memmove(pieces + at + 1, pieces + at, (piece_count++ - at) * sizeof *pieces);
    pieces[at] = piece;
    pthread_mutex_unlock(&uses_lock);
}
static void forget_uses(Piece *piece) {
    for (Use *use = piece->uses, *next; use; use = next) next = use->next, free(use);
    piece->uses = NULL;
}
// Frees a piece in the order of a stream; immediately if there is no stream.
static void piece_ends(const char *start, Seen *seen) {
    const char *wrong = NULL;
    pthread_mutex_lock(&uses_lock);
    if (seen) see(seen, &seen_by_host);
    Piece *piece = piece_around(start);
    if (!piece || piece->is_free) wrong = "memory is freed that is not allocated";
    else {
        if (seen && !has_seen(seen, piece->since)) wrong = "memory is freed on a stream that does not wait for its allocation on another one";
        for (Use *use = seen ? piece->uses : NULL; use; use = use->next) {
            if (!has_seen(seen, use->point)) wrong = "memory is freed on a stream that does not wait for its use on another one";
        }
        piece->is_free = 1;
        forget_uses(piece);
    }
    pthread_mutex_unlock(&uses_lock);
    if (wrong) mock_fail(wrong);
}
// Removes a piece whose memory the host has got back.
static void piece_is_gone(const char *start) {
    pthread_mutex_lock(&uses_lock);
    size_t behind = pieces_before(start);
    Piece *piece = behind ? pieces[behind - 1] : NULL;
    if (piece && piece->start == start) {
        memmove(pieces + behind - 1, pieces + behind, (piece_count-- - behind) * sizeof *pieces);
        forget_uses(piece);
        free(piece);
    }
    pthread_mutex_unlock(&uses_lock);
}
// Matches `emulator::Ranges` of the emulator: all device and pinned memory, by address. Valid until the thread asks
// again.
typedef struct { uint64_t start; size_t bytes; } Range;
typedef struct { const Range *of; size_t count; } Ranges;
static Ranges all_memory(void) {
    static __thread Range *of;
    pthread_mutex_lock(&uses_lock);
    of = realloc(of, (piece_count + 1) * sizeof *of);
    for (size_t i = 0; i < piece_count; i++) of[i] = (Range){(uint64_t)pieces[i]->start, pieces[i]->bytes};
    size_t count = piece_count;
    pthread_mutex_unlock(&uses_lock);
    return (Ranges){of, count};
}
// Registers that the next work on a stream uses the piece around an address, if there is one.
static void piece_is_used(const void *address, int place, Seen *seen) {
    const char *wrong = NULL;
    pthread_mutex_lock(&uses_lock);
    Piece *piece = piece_around(address);
    if (piece) {
        see(seen, &seen_by_host);
        if (piece->is_free) wrong = "memory is used after it was freed";
        else if (!has_seen(seen, piece->since)) wrong = "memory is used on a stream that does not wait for its allocation on another one";
        Use *use = piece->uses;
        while (use && use->point.place != place) use = use->next;
        if (!use) {
            use = malloc(sizeof *use);
            use->next = piece->uses;
            piece->uses = use;
        }
        use->point = (Point){place, seen->at[place] + 1};
    }
    pthread_mutex_unlock(&uses_lock);
    if (wrong) mock_fail(wrong);
}
