/* A few rows times a matrix of weights: the products of a decoding step of several sequences.
 *
 * A library's product packs its operands first, and with eight rows packing the weights costs more
 * than the product. Here weights are read once, in place: a tile is a few of their rows and a few
 * of x, and its sums stay in registers over all of K.
 */
#include <string.h>
#if defined(__FMA__)
#include <immintrin.h>
#endif

/* Floats of a vector register. The sums of a tile take sixteen registers, or eight on CPUs with few. */
#if defined(__AVX512F__)
enum { LANES = 16, SUMS = 16 };
#elif defined(__AVX__)
enum { LANES = 8, SUMS = 8 };
#else
enum { LANES = 4, SUMS = 16 };
#endif
/* Rows of weights a thread takes at a time: whole tiles. */
enum { WIDEST = 8, TAKEN = 64 };

typedef float lanes __attribute__((vector_size(4 * LANES)));

/* `count` floats, padded with zeros. */
static inline __attribute__((always_inline)) lanes loaded(const float *from, long count) {
    lanes value = {0};
    memcpy(&value, from, count * sizeof *from);
    return value;
}

static inline float sum_of(lanes value) {
    float parts[LANES], total = 0.0f;
    memcpy(parts, &value, sizeof value);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return total + parts[0];
}

/* sum + a · b. Compilers tuned for some x86 processors fuse the two in one tile and not in another;
 * with intrinsics they are fused in all, and rounding of a row does not depend on the other rows. */
static inline __attribute__((always_inline)) lanes plus(lanes sum, lanes a, lanes b) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

/* Adds the products of `count` numbers from k on to each sum. The last few take the same path as all
 * others, so that rounding is the same in every tile. */
static inline __attribute__((always_inline)) void add(
    lanes *sums, const float *x, const float *w, long inputs, long k, long count, int tall, int wide) {
    lanes given[WIDEST];
#pragma GCC unroll 8
    for (int r = 0; r < wide; r++) given[r] = loaded(x + r * inputs + k, count);
#pragma GCC unroll 16
    for (int t = 0; t < tall; t++) {
        lanes weight = loaded(w + t * inputs + k, count);
        __builtin_prefetch(w + (tall + t) * inputs + k);
#pragma GCC unroll 8
        for (int r = 0; r < wide; r++)
            sums[t * wide + r] = plus(sums[t * wide + r], weight, given[r]);
    }
}

/* y[r][t] = x[r] . w[t] for `wide` rows of x and `tall` rows of weights, both constant. */
static inline __attribute__((always_inline)) void tile(
    const float *x, const float *w, float *y, long inputs, long outputs, int tall, int wide) {
    lanes sums[SUMS];
    for (int i = 0; i < tall * wide; i++) sums[i] = (lanes){0};
    long k = 0;
    for (; k + LANES <= inputs; k += LANES) add(sums, x, w, inputs, k, LANES, tall, wide);
    if (k < inputs) add(sums, x, w, inputs, k, inputs - k, tall, wide);
    for (int t = 0; t < tall; t++)
        for (int r = 0; r < wide; r++) y[r * outputs + t] = sum_of(sums[t * wide + r]);
}

/* All of `count` rows of weights for `wide` rows of x. */
static inline __attribute__((always_inline)) void strip(
    const float *x, const float *w, float *y, long inputs, long outputs, long count, int wide) {
    long n = 0;
    for (; n + SUMS / wide <= count; n += SUMS / wide)
        tile(x, w + n * inputs, y + n, inputs, outputs, SUMS / wide, wide);
    for (; n < count; n++) tile(x, w + n * inputs, y + n, inputs, outputs, 1, wide);
}

struct job {
    const float *x, *w; /* (rows, inputs), (outputs, inputs) */
    float *y;           /* (rows, outputs) */
    long rows, inputs, outputs;
    long next; /* the next row of weights to take */
};

/* `count` rows of weights from n on for all rows of x. */
static void some(const struct job *job, long n, long count) {
    const float *weights = job->w + n * job->inputs;
    for (long r = 0; r < job->rows;) {
        long inputs = job->inputs, outputs = job->outputs, left = job->rows - r;
        const float *from = job->x + r * inputs;
        float *to = job->y + r * outputs + n;
        if (left >= 8) {
            strip(from, weights, to, inputs, outputs, count, 8);
            r += 8;
        } else if (left >= 4) {
            strip(from, weights, to, inputs, outputs, count, 4);
            r += 4;
        } else if (left >= 2) {
            strip(from, weights, to, inputs, outputs, count, 2);
            r += 2;
        } else {
            strip(from, weights, to, inputs, outputs, count, 1);
            r += 1;
        }
    }
}

/* Takes rows of weights until none is left; any number of threads may run this at once. A block of
 * weights is multiplied by all rows of x while it is in the first-level cache. */
void linear_few_rows(struct job *job) {
    for (;;) {
        long first = __atomic_fetch_add(&job->next, TAKEN, __ATOMIC_RELAXED);
        long last = job->outputs - first < TAKEN ? job->outputs : first + TAKEN;
        if (first >= job->outputs) return;
        for (long n = first; n < last; n += SUMS) some(job, n, last - n < SUMS ? last - n : SUMS);
    }
}
