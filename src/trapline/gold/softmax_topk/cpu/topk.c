/* One pass over a row of logits: the sum of exponentials behind a softmax, and the maximum of every
 * group of neighbours. The k best groups hold the k best elements; only these are read again.
 *
 * A row is read in blocks that stay in the first-level cache. A block's maximum moves the running
 * maximum (the sum so far is rescaled), and its exponentials are added.
 * Vectors are those that GCC and Clang translate for any processor. Nothing here needs -ffast-math,
 * whose start-up code would change the arithmetic of the whole process.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Floats of a vector register: compilers split wider vectors, and badly. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
/* Vectors in flight, so that no sum waits for the one before it; a group is a few of them. */
enum { STRIDES = 4, STEP = STRIDES * LANES, GROUP = 64, BLOCK = 4096, BINS = 1024 };
enum kind { FLOAT32, BFLOAT16, FLOAT16 };

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef double wide_lanes __attribute__((vector_size(8 * LANES)));
typedef int32_t lane_mask __attribute__((vector_size(4 * LANES)));
typedef uint32_t lane_bits __attribute__((vector_size(4 * LANES)));

/* Where a row's logits are: `width` of them from `at` on. */
struct source {
    const void *logits;
    enum kind kind;
    long at, width;
};

/* State of a row after some of its blocks. */
struct row {
    float largest;          /* among the elements that are numbers */
    double total;           /* sum of 2^(scale * (x - largest)) */
    uint64_t *groups;       /* a key for the maximum of every group */
};

/* Elements that may be among the k best, as keys in the order of their indices. */
struct kept {
    uint64_t *keys;
    long count, k, room;    /* held, requested, and capacity */
    float threshold;        /* elements below it are not among the k best */
    int full;               /* k are held: an element equal to the threshold comes too late */
};

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float half_to_float(uint16_t half) {
    uint32_t size = (uint32_t)(half & 0x7fffu) << 13, sign = (uint32_t)(half & 0x8000u) << 16;
    /* The exponent is rebiased by a multiplication; infinity and NaN keep the largest one. */
    uint32_t finite = bits_of(float_of(size) * 0x1p112f);
    return float_of((size >= 0x7c00u << 13 ? size | 0x7f800000u : finite) | sign);
}

static inline lanes lanes_at(const float *x) {
    lanes loaded;
    memcpy(&loaded, x, sizeof loaded);
    return loaded;
}

/* The larger of each pair; b where a is NaN. */
static inline lanes larger(lanes a, lanes b) {
    lane_mask takes_a = a > b;
    return (lanes)(((lane_mask)a & takes_a) | ((lane_mask)b & ~takes_a));
}

/* 2^y for y <= 100, to 1.2 ulp; 0 below 2^-126. The polynomial is 2^f on [-1/2, 1/2] to 2e-9. */
static inline lanes power_of_two(lanes y) {
    lanes bounded = larger((lanes){0} - 127.0f, y); /* in this order NaN stays NaN */
    lanes shifted = bounded + 0x1.8p23f; /* the nearest integer is in its lowest bits */
    lanes f = bounded - (shifted - 0x1.8p23f);
    /* In pairs, so that no multiplication waits for five others. */
    lanes square = f * f;
    lanes low = f * 0x1.62e430p-1f + 1.0f, middle = f * 0x1.c6aee8p-5f + 0x1.ebfbdcp-3f;
    lanes high = square * 0x1.41fbbap-13f + (f * 0x1.5f3e54p-10f + 0x1.3b2d4cp-7f);
    lanes p = square * (square * high + middle) + low;
    return p * (lanes)(((lane_bits)shifted + 127u) << 23);
}

/* A key that orders by value, NaN above all, equal values by the lower index first. */
static inline uint64_t key_of(float value, long index) {
    uint32_t bits = bits_of(value + 0.0f); /* -0 becomes +0 */
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    if (value != value) bits = UINT32_MAX;
    return (uint64_t)bits << 32 | (UINT32_MAX - (uint32_t)index);
}

static inline float value_of(uint64_t key) {
    uint32_t bits = (uint32_t)(key >> 32);
    return float_of(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

/* The k-th largest key: keys are counted into bins from above, and the bin with the k-th is divided
 * again, until all of its keys are taken. No two keys are equal. */
static uint64_t reached_by(long k, const uint64_t *keys, long count) {
    uint64_t low = UINT64_MAX, high = 0;
    for (long i = 0; i < count; i++) {
        low = keys[i] < low ? keys[i] : low;
        high = keys[i] > high ? keys[i] : high;
    }
    uint64_t range = high - low;
    for (;;) {
        uint32_t held[BINS] = {0};
        int shift = 0;
        while (range >> shift >= BINS) shift++;
        for (long i = 0; i < count; i++)
            if (keys[i] - low <= range) held[(keys[i] - low) >> shift]++;
        long bin = BINS - 1;
        while (held[bin] < k) k -= held[bin--];
        low += (uint64_t)bin << shift;
        if (held[bin] == k) return low;
        range = ((uint64_t)1 << shift) - 1;
    }
}

/* Keeps the k best of all keys held, in their order. */
static void prune(struct kept *kept) {
    uint64_t least = kept->count > kept->k ? reached_by(kept->k, kept->keys, kept->count) : 0;
    uint64_t worst = UINT64_MAX;
    long count = 0;
    for (long i = 0; i < kept->count; i++) {
        uint64_t key = kept->keys[i];
        kept->keys[count] = key;
        count += key >= least;
        worst = key >= least && key < worst ? key : worst;
    }
    kept->count = count;
    kept->threshold = value_of(worst);
    kept->full = count == kept->k;
}

static inline void keep(struct kept *kept, float value, long index) {
    kept->keys[kept->count++] = key_of(value, index);
    if (kept->count == kept->room) prune(kept);
}

/* Sorts the k keys by value, best first, a byte at a time; there is space for k more behind them.
 * They come in the order of their indices, and equal values stay in it. */
static void sort_best(uint64_t *keys, long k) {
    uint64_t *from = keys, *to = keys + k;
    for (int shift = 32; shift < 64; shift += 8) {
        long ends[256] = {0}, end = 0;
        for (long i = 0; i < k; i++) ends[from[i] >> shift & 255]++;
        for (int digit = 255; digit >= 0; digit--) {
            long begin = end;
            end += ends[digit];
            ends[digit] = begin;
        }
        for (long i = 0; i < k; i++) to[ends[from[i] >> shift & 255]++] = from[i];
        uint64_t *last = from;
        from = to;
        to = last;
    }
}

static inline float largest_lane(lanes values) {
    float most = values[0];
    for (int j = 1; j < LANES; j++) most = values[j] > most ? values[j] : most;
    return most;
}

/* Of whole groups; NaN is ignored. */
static float largest_of(const float *values, long count) {
    lanes most[STRIDES];
    for (int s = 0; s < STRIDES; s++) most[s] = (lanes){0} - INFINITY;
    for (long i = 0; i < count; i += STEP)
        for (int s = 0; s < STRIDES; s++)
            most[s] = larger(lanes_at(values + i + s * LANES), most[s]);
    return largest_lane(larger(larger(most[0], most[1]), larger(most[2], most[3])));
}

/* One pass over a block: maxima of its groups (NaN is ignored), and the sum of its powers. */
static double look(const float *x, float origin, float scale, float *maxima) {
    const lanes lowest = (lanes){0} - INFINITY;
    wide_lanes sums = {0};
    for (long g = 0; g < BLOCK / GROUP; g++, x += GROUP) {
        /* Few float32 additions in a row: thousands would lose small terms beside a large one. */
        lanes most[STRIDES], part[STRIDES] = {{0}};
        for (int s = 0; s < STRIDES; s++) most[s] = lowest;
        for (long i = 0; i < GROUP; i += STEP)
            for (int s = 0; s < STRIDES; s++) {
                lanes values = lanes_at(x + i + s * LANES);
                most[s] = larger(values, most[s]);
                part[s] += power_of_two((values - origin) * scale);
            }
        maxima[g] = largest_lane(larger(larger(most[0], most[1]), larger(most[2], most[3])));
        sums += __builtin_convertvector((part[0] + part[1]) + (part[2] + part[3]), wide_lanes);
    }
    double total = 0.0;
    for (int j = 0; j < LANES; j++) total += sums[j];
    return total;
}

static int has_nan(const float *x) {
    int found = 0;
    for (long i = 0; i < BLOCK; i++) found |= x[i] != x[i];
    return found;
}

static inline int any(lane_mask mask) {
    uint64_t parts[LANES / 2], all = 0;
    memcpy(parts, &mask, sizeof parts);
    for (int i = 0; i < LANES / 2; i++) all |= parts[i];
    return all != 0;
}

static const double LOG2_E = 1.4426950408889634;
/* With larger exponents a float32 sum could overflow. */
static const float HIGHEST = 100.0f;

/* A block of BLOCK elements, filled up with -inf, from `start` of the row on. */
static void take(struct row *row, const float *x, long start, float scale) {
    float maxima[BLOCK / GROUP];
    float origin = row->largest > -INFINITY ? row->largest : largest_of(x, BLOCK);
    /* With the maximum so far as origin, most blocks are read once. */
    double sum = origin > -INFINITY ? look(x, origin, scale, maxima) : 0.0;
    float largest = origin > -INFINITY ? largest_of(maxima, BLOCK / GROUP) : -INFINITY;
    if ((largest - origin) * scale > HIGHEST) {
        row->total *= exp2(((double)origin - (double)largest) * (double)scale);
        origin = largest;
        sum = look(x, origin, scale, maxima);
    }
    row->total += sum;
    if (largest > origin) row->total *= exp2(((double)origin - (double)largest) * (double)scale);
    if (largest > row->largest) row->largest = largest;
    if (origin == -INFINITY) { /* nothing but -inf so far, unless it is NaN, which must be seen */
        if (has_nan(x)) row->total = NAN;
        for (long g = 0; g < BLOCK / GROUP; g++) maxima[g] = -INFINITY;
    }
    for (long g = 0; g < BLOCK / GROUP; g++)
        row->groups[start / GROUP + g] = key_of(maxima[g], start / GROUP + g);
}

/* `size` of a row's elements from `start` on as float32, -inf beyond its end. */
static const float *part_of(const struct source *row, long start, long size, float *room) {
    long count = row->width - start < size ? row->width - start : size;
    if (row->kind == FLOAT32) {
        const float *x = (const float *)row->logits + row->at + start;
        if (count == size) return x;
        memcpy(room, x, (size_t)count * sizeof *x);
    } else {
        const uint16_t *x = (const uint16_t *)row->logits + row->at + start;
        if (row->kind == BFLOAT16)
            for (long i = 0; i < count; i++) room[i] = float_of((uint32_t)x[i] << 16);
        else
            for (long i = 0; i < count; i++) room[i] = half_to_float(x[i]);
    }
    for (long i = count; i < size; i++) room[i] = -INFINITY;
    return room;
}

/* Keeps those of a group's elements that may be among the k best. */
static void collect(struct kept *kept, const struct source *row, long start) {
    float room[GROUP];
    const float *x = part_of(row, start, GROUP, room);
    for (long i = 0; i < GROUP; i += LANES) {
        if (!any(lanes_at(x + i) >= (lanes){0} + kept->threshold)) continue;
        for (long j = i; j < i + LANES && start + j < row->width; j++)
            if (x[j] > kept->threshold || (x[j] == kept->threshold && !kept->full))
                keep(kept, x[j], start + j);
    }
}

/* The k best, from the keys of the groups' maxima. */
static void rank(struct kept *kept, const struct source *row, const uint64_t *groups) {
    long count = (row->width + GROUP - 1) / GROUP;
    uint64_t least = count > kept->k ? reached_by(kept->k, groups, count) : 0, worst = UINT64_MAX;
    if (least)
        for (long g = 0; g < count; g++)
            worst = groups[g] >= least && groups[g] < worst ? groups[g] : worst;
    /* In the k best groups k elements are not below the worst of the maxima. */
    kept->threshold = least ? value_of(worst) : -INFINITY;
    for (long g = 0; g < count; g++)
        if (groups[g] >= least) collect(kept, row, g * GROUP);
}

/* The order alone, with NaN in it: rare, so one element at a time. */
static void rank_with_nan(struct kept *kept, const struct source *row) {
    float room[BLOCK];
    for (long start = 0; start < row->width; start += BLOCK) {
        const float *x = part_of(row, start, BLOCK, room);
        for (long i = 0; i < BLOCK && start + i < row->width; i++)
            if (!kept->full || !(x[i] <= kept->threshold)) keep(kept, x[i], start + i);
    }
}

struct job {
    const void *logits;
    const float *temperatures; /* (rows) */
    uint64_t *scratch; /* for each thread: keys of elements, and of groups' maxima */
    float *values, *log_probs; /* (rows, k), and so are indices */
    int64_t *indices;
    float *lse, *row_max; /* (rows) */
    long kind, stride, width;
    long room, group_room; /* keys a thread: at least 2 k; whole blocks of groups */
    long k, rows;
    long next, threads; /* the next row to take; threads that have started */
};

/* Row n, in a thread's keys of elements and of groups. */
static void one_row(const struct job *job, long n, uint64_t *keys, uint64_t *groups) {
    float block[BLOCK];
    long k = job->k, width = job->width;
    struct source source = {job->logits, (enum kind)job->kind, n * job->stride, width};
    struct row row = {-INFINITY, 0.0, groups};
    struct kept kept = {keys, 0, k, job->room, -INFINITY, 0};
    double temperature = job->temperatures[n];
    float scale = (float)(LOG2_E / temperature);
    for (long start = 0; start < width; start += BLOCK)
        take(&row, part_of(&source, start, BLOCK, block), start, scale);
    if (row.total != row.total) rank_with_nan(&kept, &source);
    else rank(&kept, &source, groups);
    prune(&kept);
    sort_best(keys, k);
    float best = value_of(keys[0]);
    double log_total = log(row.total);
    for (long i = 0; i < k; i++) {
        float value = value_of(keys[i]);
        job->values[n * k + i] = value;
        job->log_probs[n * k + i] = (float)((double)(value - best) / temperature - log_total);
        job->indices[n * k + i] = UINT32_MAX - (uint32_t)keys[i];
    }
    job->row_max[n] = best;
    job->lse[n] = (float)((double)best / temperature + log_total);
}

/* Takes rows until none is left; at most as many threads at once as have scratch space. */
void softmax_topk(struct job *job) {
    long me = __atomic_fetch_add(&job->threads, 1, __ATOMIC_RELAXED);
    for (;;) {
        long n = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (n >= job->rows) return;
        uint64_t *keys = job->scratch + me * (job->room + job->group_room);
        one_row(job, n, keys, keys + job->room);
    }
}
