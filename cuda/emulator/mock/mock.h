// The interface between the mock libraries: work on a stream runs in order, on the stream's own thread.
#pragma once
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct Stream Stream;
// Runs `run` after the work already on the stream. The handles 0, 1 and 2 are the default streams.
void mock_enqueue(Stream *stream, void (*run)(void *), void *argument);
// Registers that the next work on the stream accesses the memory around an address, if it is device or pinned memory.
void mock_use(Stream *stream, const void *address);
// Adds `change` to the number of collectives in flight on a device.
void mock_collective(int device, int change);
// The device of this thread's context, counted from 1; 0 without a context.
int mock_current(void);
// Checks that the current device can access the memory directly. If it cannot, all later calls fail.
void mock_reach(const void *start);
// Adds to a counter of counters.h.
void mock_count(long *counter, long by);
extern long mock_collectives, mock_products, mock_lt_products, mock_product_bytes_read, mock_product_bytes_written;

// Starts a thread that nobody joins. It is detached from the start: glibc's pthread_detach detaches a running thread and then reads its
// descriptor again, but the thread may have ended in between, and its memory may be unmapped.
static inline int start_detached(void *(*run)(void *), void *argument) {
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int code = pthread_create(&thread, &attributes, run, argument);
    pthread_attr_destroy(&attributes);
    return code;
}
