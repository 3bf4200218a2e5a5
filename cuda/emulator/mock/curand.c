// libcurand.so.10 on the mock driver: random numbers as a function of seed and position, on the generator's stream.
// They differ from those of the real library.
#include <math.h>

#include "mock.h"

enum { NOT_INITIALIZED = 101, LENGTH_NOT_MULTIPLE = 105 };
typedef struct { Stream *stream; uint64_t seed, offset; } Generator;
typedef struct { void *to; size_t count; uint64_t seed, offset; int in_f64, normal; double mean, deviation; } Job;

int curandCreateGenerator(Generator **generator, int kind) {
    (void)kind;
    *generator = NULL;
    if (!mock_current()) return NOT_INITIALIZED;
    *generator = calloc(1, sizeof **generator);
    return 0;
}
int curandDestroyGenerator(Generator *generator) { free(generator); return 0; }
int curandSetStream(Generator *generator, Stream *stream) { generator->stream = stream; return 0; }
int curandSetPseudoRandomGeneratorSeed(Generator *generator, uint64_t seed) {
    generator->seed = seed;
    generator->offset = 0;
    return 0;
}
int curandSetGeneratorOffset(Generator *generator, uint64_t offset) { generator->offset = offset; return 0; }

// Uniform in (0, 1], like cuRAND's numbers; SplitMix64 of a counter.
static double uniform(uint64_t seed, uint64_t place) {
    uint64_t x = seed * 0xd1342543de82ef95 + (place + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return ((x ^ x >> 31) >> 40) * 0x1p-24 + 0x1p-24;
}
static void generate(void *argument) {
    Job *job = argument;
    for (size_t i = 0; i < job->count; i++) {
        double value = uniform(job->seed, job->offset + i);
        if (job->normal) {
            // The Box-Muller transform makes two normal numbers from two uniform ones.
            uint64_t pair = job->offset + (i & ~(size_t)1);
            double size = sqrt(-2 * log(uniform(job->seed, pair))), angle = 2 * M_PI * uniform(job->seed, pair + 1);
            value = job->mean + job->deviation * size * (i & 1 ? sin(angle) : cos(angle));
        }
        if (job->in_f64) ((double *)job->to)[i] = value; else ((float *)job->to)[i] = value;
    }
    free(job);
}
static int begin(Generator *generator, Job job) {
    if (job.normal && job.count % 2) return LENGTH_NOT_MULTIPLE;
    job.seed = generator->seed;
    job.offset = generator->offset;
    generator->offset += job.count;
    Job *own = malloc(sizeof *own);
    *own = job;
    mock_use(generator->stream, job.to);
    mock_enqueue(generator->stream, generate, own);
    return 0;
}
int curandGenerateUniform(Generator *generator, float *to, size_t count) {
    return begin(generator, (Job){.to = to, .count = count});
}
int curandGenerateUniformDouble(Generator *generator, double *to, size_t count) {
    return begin(generator, (Job){.to = to, .count = count, .in_f64 = 1});
}
int curandGenerateNormal(Generator *generator, float *to, size_t count, float mean, float deviation) {
    return begin(generator, (Job){.to = to, .count = count, .normal = 1, .mean = mean, .deviation = deviation});
}
int curandGenerateNormalDouble(Generator *generator, double *to, size_t count, double mean, double deviation) {
    return begin(generator, (Job){.to = to, .count = count, .in_f64 = 1, .normal = 1, .mean = mean, .deviation = deviation});
}
