// The part of driver.c that runs kernels. A module is a library of emulated kernels
// (cuda/emulator/headers/emulator.h), whose blocks run on the stream's thread.

// The size of an ELF file: its section table is last.
static size_t elf_bytes(const unsigned char *image) {
    uint64_t sections;
    uint16_t size, count;
    memcpy(&sections, image + 40, sizeof sections);
    memcpy(&size, image + 58, sizeof size);
    memcpy(&count, image + 60, sizeof count);
    return sections + (size_t)size * count;
}
// Decodes the base64 text that follows the first line. The caller frees the result.
static unsigned char *decoded(const char *text) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    unsigned char value[256] = {0}, *bytes = malloc(strlen(text)), *to = bytes;
    for (int i = 0; i < 64; i++) value[(unsigned char)digits[i]] = i;
    unsigned bits = 0, count = 0;
    for (const char *from = strchr(text, '\n') + 1; *from && *from != '='; from++) {
        bits = bits << 6 | value[(unsigned char)*from];
        count += 6;
        if (count >= 8) *to++ = bits >> (count -= 8);
    }
    return bytes;
}
// Loading a kernel may wait until a device is idle. A device with a collective in flight is not idle while the
// collective waits for other ranks, so the program hangs if those wait for this one. With `mock_refuse_lazy_loading`
// set, such a load is an error.
int mock_refuse_lazy_loading;
static int collectives[MOST_DEVICES + 1];
void mock_collective(int device, int change) { __atomic_fetch_add(&collectives[device], change, __ATOMIC_RELAXED); }
static int may_load(void) {
    int is_late = mock_refuse_lazy_loading && __atomic_load_n(&collectives[current], __ATOMIC_RELAXED);
    if (is_late) fprintf(stderr, "mock: kernels are loaded while a collective is in flight\n");
    return !is_late;
}

typedef struct { void *library; int device; unsigned count; char **names; } Module;
// Finds the names of all entries, which the library exports with the suffix `_entry`.
static void find_entries(Module *module, const unsigned char *image) {
    const Elf64_Ehdr *head = (const void *)image;
    const Elf64_Shdr *sections = (const void *)(image + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++) {
        if (sections[i].sh_type != SHT_DYNSYM) continue;
        const Elf64_Sym *symbols = (const void *)(image + sections[i].sh_offset);
        const char *names = (const char *)image + sections[sections[i].sh_link].sh_offset;
        size_t all = sections[i].sh_size / sizeof *symbols;
        module->names = malloc(all * sizeof *module->names);
        for (size_t s = 0; s < all; s++) {
            const char *name = names + symbols[s].st_name, *end = strstr(name, "_entry");
            if (end && !end[6] && symbols[s].st_shndx) module->names[module->count++] = strndup(name, end - name);
        }
    }
}
// Matches `emulator::Traffic` of the emulator.
typedef struct { size_t read, written, accessed; } Traffic;
static void count_traffic(const Traffic *of);
// A library that watches its kernels' memory accesses (EMULATED_NVCC_CHECKS of cuda/emulator/nvcc) asks which memory
// is valid, and reports its traffic.
static void listen_to(void *library) {
    Ranges (**memory)(void) = dlsym(library, "emulated_memory");
    void (**traffic)(const Traffic *) = dlsym(library, "emulated_traffic");
    if (memory) *memory = all_memory;
    if (traffic) *traffic = count_traffic;
}
// Watching libraries: while `mock_watches` is set, their kernels run instead of the kernels of the same names that were
// looked up later.
enum { MOST_WATCHED = 32 };
static void *watched[MOST_WATCHED];
static int watched_count;
int mock_watches;
int mock_watch(const char *path) {
    void *library = watched_count < MOST_WATCHED ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) return INVALID_IMAGE;
    listen_to(library);
    watched[watched_count++] = library;
    return 0;
}
static int load(Module **module, const unsigned char *image) {
    size_t bytes = elf_bytes(image);
    int file = memfd_create("kernels", 0);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int written = file >= 0 && write(file, image, bytes) == (ssize_t)bytes;
    // The file stays open: the loader would take another file at this path for the same library.
    void *library = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) return INVALID_IMAGE;
    listen_to(library);
    *module = malloc(sizeof **module);
    **module = (Module){library, current, 0, NULL};
    find_entries(*module, image);
    return 0;
}
long mock_modules; // loaded so far
int cuModuleLoadData(Module **module, const void *image) {
    NEEDS_CONTEXT;
    if (!may_load()) return NOT_PERMITTED;
    mock_count(&mock_modules, 1);
    static const char text[] = "// kernels for the emulator";
    if (!memcmp(image, "\177ELF", 4)) return (uintptr_t)image % 8 ? INVALID_IMAGE : load(module, image);
    if (strncmp(image, text, sizeof text - 1)) return *(const char *)image ? NO_BINARY : INVALID_IMAGE;
    unsigned char *bytes = decoded(image);
    int code = load(module, bytes);
    free(bytes);
    return code;
}
int cuModuleUnload(Module *module) {
    NEEDS_CONTEXT;
    // Its kernels may still be running.
    wait_for_streams(module->device);
    int code = dlclose(module->library) ? INVALID_VALUE : 0;
    for (unsigned i = 0; i < module->count; i++) free(module->names[i]);
    free(module->names);
    free(module);
    return code;
}

// Matches `emulator::Entry` of the emulator.
typedef struct {
    size_t bytes;
    void (*collect)(void *const *parameters, void *to);
    const char *(*run)(
        const void *args, size_t bytes, const unsigned *grid, const unsigned *block, size_t shared, unsigned order);
} Entry;
// Number of launches, and the bytes that a watched kernel read, wrote and accessed in all of them.
enum { LAUNCHES, READ, WRITTEN, ACCESSED, COUNTS };
typedef struct Function { const Entry *entry, *watched; int most_shared, device; long counts[COUNTS]; struct Function *next; char name[]; } Function;
// Functions are never freed, because the driver's API does not release them.
static Function *functions;
static void print_launches(void) {
    for (Function *of = __atomic_load_n(&functions, __ATOMIC_ACQUIRE); of; of = of->next) {
        const long *counts = of->counts;
        if (!counts[LAUNCHES]) continue;
        fprintf(stderr, "launches %s %ld", of->name, counts[LAUNCHES]);
        if (counts[ACCESSED]) fprintf(stderr, " read %ld written %ld accessed %ld", counts[READ], counts[WRITTEN], counts[ACCESSED]);
        fprintf(stderr, "\n");
    }
}
// Iterates over the functions that were looked up; `before` is NULL for the first.
const Function *mock_function(const Function *before, const char **name, const long **counts) {
    const Function *of = before ? before->next : __atomic_load_n(&functions, __ATOMIC_ACQUIRE);
    if (of) *name = of->name, *counts = of->counts;
    return of;
}
static __thread Function *running;
static void count_traffic(const Traffic *of) {
    mock_count(&running->counts[READ], of->read);
    mock_count(&running->counts[WRITTEN], of->written);
    mock_count(&running->counts[ACCESSED], of->accessed);
}
int cuModuleGetFunction(Function **function, Module *module, const char *name) {
    NEEDS_CONTEXT;
    if (!may_load()) return NOT_PERMITTED;
    char with_end[256];
    snprintf(with_end, sizeof with_end, "%s_entry", name);
    const Entry *entry = dlsym(module->library, with_end);
    if (!entry) return NOT_FOUND;
    const Entry *instead = NULL;
    for (int i = 0; !instead && i < watched_count; i++) instead = dlsym(watched[i], with_end);
    *function = malloc(sizeof **function + strlen(name) + 1);
    **function = (Function){entry, instead, 48 << 10, module->device, {0}, __atomic_load_n(&functions, __ATOMIC_RELAXED)};
    strcpy((*function)->name, name);
    while (!__atomic_compare_exchange_n(&functions, &(*function)->next, *function, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
    return 0;
}
int cuModuleGetFunctionCount(unsigned *count, Module *module) { *count = module->count; return 0; }
int cuModuleEnumerateFunctions(Function **all, unsigned room, Module *module) {
    int code = 0;
    for (unsigned i = 0; !code && i < room && i < module->count; i++) code = cuModuleGetFunction(&all[i], module, module->names[i]);
    return code;
}
int cuFuncGetName(const char **name, Function *function) { *name = function->name; return 0; }
int cuFuncLoad(Function *function) { (void)function; NEEDS_CONTEXT; return 0; }
// Attribute 8 is the largest dynamic shared memory that a launch may request.
int cuFuncSetAttribute(Function *function, int attribute, int value) {
    NEEDS_CONTEXT;
    if (attribute != 8 || value > 227 << 10) return INVALID_VALUE;
    function->most_shared = value;
    return 0;
}
int cuFuncGetAttribute(int *value, int attribute, Function *function) {
    switch (attribute) {
        case 0: *value = 1024; return 0; // threads per block
        case 1: case 3: case 4: *value = 0; return 0; // shared and local bytes, registers
        case 8: *value = function->most_shared; return 0;
        default: return INVALID_VALUE;
    }
}

typedef struct { Function *function; unsigned grid[3], block[3], shared; char args[] __attribute__((aligned(16))); } Start;
static void start(void *argument) {
    Start *job = argument;
    static unsigned order; // of blocks and threads: changes with each launch
    running = job->function;
    const Entry *entry = mock_watches && running->watched ? running->watched : running->entry;
    const char *failure = entry->run(
        job->args, entry->bytes, job->grid, job->block, job->shared, __atomic_fetch_add(&order, 1, __ATOMIC_RELAXED) % 4);
    if (failure) {
        char with_name[512];
        snprintf(with_name, sizeof with_name, "%s: %s", job->function->name, failure);
        mock_fail(with_name);
    }
    free(job);
}
int cuLaunchKernel(Function *function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y, unsigned threads_z,
    unsigned shared, Stream *stream, void **parameters, void **extra) {
    NEEDS_CONTEXT;
    NEEDS_HEALTH;
    uint64_t threads = (uint64_t)threads_x * threads_y * threads_z;
    if (!x || !y || !z || y > 65535 || z > 65535 || !threads || threads > 1024 || extra) return INVALID_VALUE;
    if ((int)shared > function->most_shared) return INVALID_VALUE;
    if (stream_of(stream)->device != function->device) return INVALID_HANDLE;
    COUNT(launches, 1);
    mock_count(&function->counts[LAUNCHES], 1);
    Start *job = calloc(1, sizeof *job + function->entry->bytes);
    *job = (Start){function, {x, y, z}, {threads_x, threads_y, threads_z}, shared};
    function->entry->collect(parameters, job->args);
    // Every value that looks like an address is treated as one.
    for (size_t at = 0; at + sizeof(void *) <= function->entry->bytes; at += sizeof(void *)) mock_use(stream, *(void **)(job->args + at));
    mock_enqueue(stream, start, job);
    return 0;
}
