// The part of driver.c that manages memory: host memory, counted as if it were a device's.
//
// Guard bytes surround each piece. A piece is filled with ones (NaN) when the stream reaches its allocation, and again
// when the stream reaches its free. It then stays in quarantine for a while before the host gets it back, so that
// writes to freed memory are detected.
enum { ROOM = 256, GUARD = 0xC3, UNWRITTEN = 0xFF, GONE = 0xFF, PLAIN = 0, POOLED = 1, PINNED = 2 };
static const size_t QUARANTINE = (size_t)64 << 20;

typedef struct Block { size_t bytes; int device, kind; struct Block *next; } Block;
// Bits of `readers` are the devices that may access the pool's memory, besides its own device.
typedef struct { uint64_t plain, used, most_used, reserved, most_reserved, threshold, readers; Block *live; Chunk *chunks; } Pool;
static Pool pools[MOST_DEVICES + 1];
static Block *pinned, *gone, **last_gone = &gone;
static size_t gone_bytes;
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t device_bytes(void) {
    static uint64_t bytes;
    if (!bytes) {
        const char *said = getenv("MOCK_DEVICE_BYTES");
        bytes = said ? strtoull(said, NULL, 10) : (uint64_t)8 << 30;
    }
    return bytes;
}

static void insert(Block **list, Block *block) {
    pthread_mutex_lock(&memory_lock);
    block->next = *list;
    *list = block;
    pthread_mutex_unlock(&memory_lock);
}
static void withdraw(Block **list, Block *block) {
    pthread_mutex_lock(&memory_lock);
    while (*list && *list != block) list = &(*list)->next;
    if (*list) *list = block->next;
    pthread_mutex_unlock(&memory_lock);
}
static char *start_of(Block *block) { return (char *)block + ROOM; }
static Block *block_at(const void *start) { return (Block *)((uintptr_t)start - ROOM); }
static int all_are(const char *bytes, size_t count, int value) {
    return !count || ((unsigned char)bytes[0] == value && !memcmp(bytes, bytes + 1, count - 1));
}

static Block *take(size_t bytes, int kind) {
    Block *block = NULL;
    if (posix_memalign((void **)&block, ROOM, ROOM + bytes + ROOM)) return NULL;
    memset(block, GUARD, ROOM);
    memset(start_of(block) + bytes, GUARD, ROOM);
    *block = (Block){bytes, current, kind, NULL};
    return block;
}
static void check(Block *block) {
    const char *before = (char *)(block + 1), *after = start_of(block) + block->bytes;
    if (!all_are(before, ROOM - sizeof *block, GUARD) || !all_are(after, ROOM, GUARD)) {
        mock_fail("a write beyond the ends of an allocation");
    }
}
// Frees a piece, once no work in flight may touch it.
static void give_back(void *argument) {
    Block *block = argument;
    if (block->kind == POOLED) withdraw(&pools[block->device].live, block);
    check(block);
    memset(start_of(block), GONE, block->bytes);
    pthread_mutex_lock(&memory_lock);
    block->next = NULL;
    *last_gone = block;
    last_gone = &block->next;
    gone_bytes += block->bytes;
    while (gone && gone_bytes > QUARANTINE) {
        Block *oldest = gone;
        gone = oldest->next;
        if (!gone) last_gone = &gone;
        gone_bytes -= oldest->bytes;
        check(oldest);
        if (!all_are(start_of(oldest), oldest->bytes, GONE)) mock_fail("a write to memory that was freed");
        piece_is_gone(start_of(oldest));
        free(oldest);
    }
    pthread_mutex_unlock(&memory_lock);
}
static void unwritten(void *argument) { memset(start_of(argument), UNWRITTEN, ((Block *)argument)->bytes); }

// Limits the unused memory that the pool holds to `keep` bytes.
static void shrink(Pool *pool, uint64_t keep) {
    if (pool->reserved > keep) pool->reserved -= take_chunks(&pool->chunks, NULL, pool->reserved - keep);
}
// Memory is counted when the host makes the call, so that a test gets the same numbers each time. A pool's reserved
// memory is what is in use plus the unused memory that it holds.
static int allocate(uint64_t *address, size_t bytes, int kind, Stream *on) {
    NEEDS_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    Pool *pool = &pools[current];
    uint64_t plain = pool->plain + (kind == PLAIN ? bytes : 0), used = pool->used + (kind == POOLED ? bytes : 0);
    int fits = bytes <= device_bytes() && plain + used <= device_bytes();
    if (fits) {
        pool->plain = plain;
        pool->used = used;
        if (kind == POOLED) pool->reserved += bytes - take_chunks(&pool->chunks, seen_by(on), bytes);
        // Unused memory of the pool is available to others.
        shrink(pool, device_bytes() - plain);
        if (used > pool->most_used) pool->most_used = used;
        if (pool->reserved > pool->most_reserved) pool->most_reserved = pool->reserved;
    }
    pthread_mutex_unlock(&memory_lock);
    Block *block = fits ? take(bytes, kind) : NULL;
    *address = block ? (uint64_t)start_of(block) : 0;
    return block ? 0 : OUT_OF_MEMORY;
}
static void uncount(const Block *block, Stream *on) {
    int is_pooled = block->kind == POOLED;
    pthread_mutex_lock(&memory_lock);
    Pool *pool = &pools[block->device];
    if (is_pooled) keep_chunk(&pool->chunks, next_on(on), block->bytes);
    *(is_pooled ? &pool->used : &pool->plain) -= block->bytes;
    pthread_mutex_unlock(&memory_lock);
}
// When the host waits, a pool releases the unused memory beyond its threshold.
static void release_reserved(void) {
    pthread_mutex_lock(&memory_lock);
    Pool *pool = &pools[current];
    shrink(pool, pool->used > pool->threshold ? pool->used : pool->threshold);
    pthread_mutex_unlock(&memory_lock);
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    int code = allocate(address, bytes, PLAIN, NULL);
    if (!code) piece_begins((char *)*address, bytes, 0, NULL), unwritten(block_at((void *)*address));
    COUNT(plain_allocations, 1);
    return code;
}
int cuMemFree_v2(uint64_t address) {
    NEEDS_CONTEXT;
    COUNT(plain_frees, 1);
    COUNT_WAIT(free);
    Block *block = block_at((void *)address);
    uncount(block, NULL);
    piece_ends(start_of(block), NULL);
    give_back(block);
    return 0;
}
int cuMemAllocAsync(uint64_t *address, size_t bytes, Stream *stream) {
    NEEDS_HEALTH;
    COUNT(pool_allocations, 1);
    int code = allocate(address, bytes, POOLED, stream);
    if (code) return code;
    Block *block = block_at((void *)*address);
    insert(&pools[block->device].live, block);
    allocated(stream, start_of(block), bytes);
    mock_enqueue(stream, unwritten, block);
    return 0;
}
int cuMemFreeAsync(uint64_t address, Stream *stream) {
    NEEDS_CONTEXT;
    COUNT(pool_frees, 1);
    Block *block = block_at((void *)address);
    uncount(block, stream);
    freed(stream, start_of(block));
    mock_enqueue(stream, give_back, block);
    return 0;
}
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&memory_lock);
    *total = device_bytes();
    *free = *total - pools[current].plain - pools[current].reserved;
    pthread_mutex_unlock(&memory_lock);
    return 0;
}

int cuDeviceGetDefaultMemPool(Pool **pool, int device) { *pool = &pools[device + 1]; return 0; }
int cuDeviceGetMemPool(Pool **pool, int device) { *pool = &pools[device + 1]; return 0; }
static uint64_t *attribute_of(Pool *pool, int attribute) {
    switch (attribute) {
        case 4: return &pool->threshold;
        case 5: return &pool->reserved;
        case 6: return &pool->most_reserved;
        case 7: return &pool->used;
        case 8: return &pool->most_used;
        default: return NULL;
    }
}
int cuMemPoolGetAttribute(Pool *pool, int attribute, uint64_t *value) {
    uint64_t *from = attribute_of(pool, attribute);
    if (!from) return INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    *value = *from;
    pthread_mutex_unlock(&memory_lock);
    return 0;
}
// Sets the threshold, or resets a high-water mark (the only value allowed is zero).
int cuMemPoolSetAttribute(Pool *pool, int attribute, const uint64_t *value) {
    if ((attribute != 4 && attribute != 6 && attribute != 8) || (attribute != 4 && *value)) return INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    *attribute_of(pool, attribute) = attribute == 4 ? *value : *attribute_of(pool, attribute - 1);
    pthread_mutex_unlock(&memory_lock);
    return 0;
}
int cuMemPoolTrimTo(Pool *pool, size_t keep) {
    pthread_mutex_lock(&memory_lock);
    shrink(pool, keep > pool->used ? keep : pool->used);
    pthread_mutex_unlock(&memory_lock);
    return 0;
}

int cuMemHostAlloc(void **start, size_t bytes, unsigned flags) {
    NEEDS_CONTEXT;
    (void)flags;
    COUNT(pinned_allocations, 1);
    Block *block = bytes ? take(bytes, PINNED) : NULL;
    if (!block) return bytes ? OUT_OF_MEMORY : INVALID_VALUE;
    piece_begins(start_of(block), bytes, 0, NULL);
    unwritten(block);
    insert(&pinned, block);
    *start = start_of(block);
    return 0;
}
int cuMemFreeHost(void *start) {
    NEEDS_CONTEXT;
    COUNT(pinned_frees, 1);
    COUNT_WAIT(free);
    Block *block = block_at(start);
    withdraw(&pinned, block);
    piece_ends(start, NULL);
    give_back(block);
    return 0;
}
static int holds(Block **list, const char *start) {
    pthread_mutex_lock(&memory_lock);
    Block *block = *list;
    while (block && !(start >= start_of(block) && start < start_of(block) + block->bytes)) block = block->next;
    pthread_mutex_unlock(&memory_lock);
    return block != NULL;
}
static int is_pinned(const char *start) { return holds(&pinned, start); }

// Cross-device access: plain memory is open to all devices that can reach it, pool memory only to devices that have
// been granted access.
typedef struct { int type, device, flags; } Access; // type 1 is a device; flags 3 is read and write
int cuMemPoolSetAccess(Pool *pool, const Access *access, size_t count) {
    for (size_t i = 0; i < count; i++) {
        int can = 0, owner = (int)(pool - pools) - 1, reader = access[i].device;
        if (access[i].type != 1 || (access[i].flags != 3 && access[i].flags)) return INVALID_VALUE;
        if (reader == owner || cuDeviceCanAccessPeer(&can, reader, owner) || !can) return INVALID_DEVICE;
        pthread_mutex_lock(&memory_lock);
        uint64_t bit = 1ull << reader;
        pool->readers = access[i].flags ? pool->readers | bit : pool->readers & ~bit;
        pthread_mutex_unlock(&memory_lock);
    }
    return 0;
}
void mock_reach(const void *start) {
    for (int owner = 0; owner < devices(); owner++) {
        int can;
        cuDeviceCanAccessPeer(&can, current - 1, owner);
        if (owner == current - 1 || !can || pools[owner + 1].readers >> (current - 1) & 1) continue;
        if (holds(&pools[owner + 1].live, start)) mock_fail("memory in the pool of another device, which does not grant access to this device");
    }
}

typedef struct { char *to; const char *from; size_t bytes; char staged[]; } Copy;
static void copy(void *argument) {
    Copy *job = argument;
    if (job->from != job->staged) usleep(50); // time for unsynchronized code to fail
    memmove(job->to, job->from, job->bytes);
    free(job);
}
static int copy_on(Stream *stream, void *to, const void *from, size_t bytes, int staged) {
    NEEDS_CONTEXT;
    Copy *job = malloc(sizeof *job + (staged ? bytes : 0));
    *job = (Copy){to, staged ? memcpy(job->staged, from, bytes) : from, bytes};
    if (!staged) mock_use(stream, from);
    mock_use(stream, to);
    mock_enqueue(stream, copy, job);
    return 0;
}
// Like the driver, reads unpinned memory during the call, and writes it before the call returns.
static int copy_up(Stream *on, uint64_t to, const void *from, size_t bytes) {
    int pageable = !is_pinned(from);
    COUNT(copies_up, 1), COUNT(bytes_up, bytes), COUNT(pageable_up, pageable);
    return copy_on(on, (void *)to, from, bytes, pageable);
}
static int copy_down(Stream *on, void *to, uint64_t from, size_t bytes) {
    COUNT(copies_down, 1), COUNT(bytes_down, bytes), COUNT(pageable_down, !is_pinned(to));
    return copy_on(on, to, (void *)from, bytes, 0);
}
static int copy_within(Stream *on, uint64_t to, uint64_t from, size_t bytes) {
    COUNT(copies_within, 1), COUNT(bytes_within, bytes);
    return copy_on(on, (void *)to, (void *)from, bytes, 0);
}
static int then_wait(int code, Stream *on) {
    if (code) return code;
    COUNT_WAIT(copy);
    return synchronize(on);
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, Stream *on) {
    if (bytes > STAGED_BYTES && !is_pinned(from)) COUNT_WAIT(copy);
    return copy_up(on, to, from, bytes);
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, Stream *on) {
    int code = copy_down(on, to, from, bytes);
    return is_pinned(to) ? code : then_wait(code, on);
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream *on) { return copy_within(on, to, from, bytes); }
int cuMemcpyPeerAsync(uint64_t to, void *to_context, uint64_t from, void *from_context, size_t bytes, Stream *on) {
    (void)to_context, (void)from_context;
    return copy_within(on, to, from, bytes);
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { return then_wait(copy_up(NULL, to, from, bytes), NULL); }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { return then_wait(copy_down(NULL, to, from, bytes), NULL); }
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t bytes) { return then_wait(copy_within(NULL, to, from, bytes), NULL); }

typedef struct { char *to; size_t bytes; unsigned char value; } Fill;
static void fill(void *argument) {
    Fill *job = argument;
    memset(job->to, job->value, job->bytes);
    free(job);
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, Stream *stream) {
    NEEDS_CONTEXT;
    COUNT(fills, 1), COUNT(bytes_filled, bytes);
    Fill *job = malloc(sizeof *job);
    *job = (Fill){(char *)to, bytes, value};
    mock_use(stream, (void *)to);
    mock_enqueue(stream, fill, job);
    return 0;
}
int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t bytes) {
    return then_wait(cuMemsetD8Async(to, value, bytes, NULL), NULL);
}
