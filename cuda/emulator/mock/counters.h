// The part of driver.c that counts driver calls. Tests read the counters by name. With MOCK_COUNTS set the program
// prints them to standard error at exit, with the launches of each kernel and the bytes that watched kernels access.
//
// "up" is host to device, "down" device to host, "within" device to device, also between two devices. A host wait is a
// call that a real driver returns from only when work on the device is done: mock_waits counts all host waits, and
// further counters count each kind.
#define COUNTERS(X) \
    X(launches) X(collectives) X(products) X(lt_products) X(product_bytes_read) X(product_bytes_written) \
    X(copies_up) X(bytes_up) X(copies_down) X(bytes_down) X(copies_within) X(bytes_within) X(fills) X(bytes_filled) \
    X(pageable_up) X(pageable_down) /* copies from and to memory that is not pinned */ \
    X(pool_allocations) X(pool_frees) X(plain_allocations) X(plain_frees) X(pinned_allocations) X(pinned_frees) \
    X(records) X(event_waits) X(queries) /* events recorded, waited for by streams, asked by the host */ \
    X(waits) X(waits_stream) X(waits_event) X(waits_context) X(waits_copy) X(waits_free)
#define DEFINE(NAME) long mock_##NAME;
COUNTERS(DEFINE)
#define COUNT(NAME, BY) ((void)__atomic_fetch_add(&mock_##NAME, (long)(BY), __ATOMIC_RELAXED))
#define COUNT_WAIT(KIND) (COUNT(waits, 1), COUNT(waits_##KIND, 1))
// A copy from pageable memory of up to this size is staged during the call; larger ones wait for the stream.
enum { STAGED_BYTES = 64 << 10 };

void mock_count(long *counter, long by) { __atomic_fetch_add(counter, by, __ATOMIC_RELAXED); }
static void print_launches(void);
__attribute__((destructor)) static void print_counts(void) {
    if (!getenv("MOCK_COUNTS")) return;
#define PRINT(NAME) fprintf(stderr, "mock_" #NAME " %ld\n", __atomic_load_n(&mock_##NAME, __ATOMIC_RELAXED));
    COUNTERS(PRINT)
    print_launches();
}
