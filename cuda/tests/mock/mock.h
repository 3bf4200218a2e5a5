// What the libraries of the mock know of each other: work that is put on a stream is done in order, on the stream's own thread.
#pragma once
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct Stream Stream;
// Behind what is on the stream. The handles 0, 1 and 2 are the default streams.
void mock_enqueue(Stream *stream, void (*run)(void *), void *argument);
// What comes next on the stream reads or writes the memory around an address, if that is a device's.
void mock_use(Stream *stream, const void *address);
// One more collective is in flight on a device, or one less.
void mock_collective(int device, int change);
// The device of this thread's context, from 1; 0 without one.
int mock_current(void);
// The current device reads there without help of the host. If it cannot, all later calls fail.
void mock_reach(const void *start);
// More in a counter of counters.h.
void mock_count(long *counter, long by);
extern long mock_collectives, mock_products, mock_lt_products, mock_product_bytes_read, mock_product_bytes_written;
