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
