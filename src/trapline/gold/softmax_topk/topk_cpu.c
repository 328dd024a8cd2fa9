/* One pass over a row of logits: the k largest, and the sum of exponentials behind a softmax.
 *
 * A row is read in blocks that stay in the first-level cache. A block's maximum moves the running
 * maximum (the sum so far is rescaled), its exponentials are added, and those of its elements that
 * beat the k-th best so far are kept. Only groups whose maximum beats it are looked at one by one.
 * Vectors are those that GCC and Clang translate for any processor. Nothing here needs -ffast-math,
 * whose start-up code would change the arithmetic of the whole process.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* A vector register's floats: wider vectors would be translated into several, and badly. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
/* Vectors in flight, so that no sum waits for the one before it; a group is a few of them. */
enum { STRIDES = 4, STEP = STRIDES * LANES, GROUP = 64, BLOCK = 4096 };
enum kind { FLOAT32, BFLOAT16, FLOAT16 };

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef double wide_lanes __attribute__((vector_size(8 * LANES)));
typedef int32_t lane_mask __attribute__((vector_size(4 * LANES)));
typedef uint32_t lane_bits __attribute__((vector_size(4 * LANES)));

/* What is known of a row after some of its blocks. */
struct row {
    float largest;          /* among the elements that are numbers */
    double total;           /* sum of 2^(scale * (x - largest)) */
    uint64_t *kept;         /* keys of elements that may be among the k best */
    long count, k, room;    /* keys held, wanted, and how many there is space for */
    float threshold;        /* no later element is among the k best unless it is larger */
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
    lanes bounded = larger((lanes){0} - 127.0f, y); /* this way round NaN stays NaN */
    lanes shifted = bounded + 0x1.8p23f; /* the nearest integer is in its lowest bits */
    lanes f = bounded - (shifted - 0x1.8p23f);
    /* In pairs, so that no multiplication waits for five others. */
    lanes square = f * f;
    lanes low = f * 0x1.62e430p-1f + 1.0f, middle = f * 0x1.c6aee8p-5f + 0x1.ebfbdcp-3f;
    lanes high = square * 0x1.41fbbap-13f + (f * 0x1.5f3e54p-10f + 0x1.3b2d4cp-7f);
    lanes p = square * (square * high + middle) + low;
    return p * (lanes)(((lane_bits)shifted + 127u) << 23);
}

/* Orders as the values do, NaN above all, equal values by the lower index first. */
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

static int descending(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a < b) - (a > b);
}

/* Moves the k largest keys to the front. No two keys are equal. */
static void partition_best(uint64_t *keys, long count, long k) {
    long low = 0, high = count - 1;
    while (low < high) {
        uint64_t a = keys[low], b = keys[(low + high) / 2], c = keys[high];
        uint64_t pivot = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
        long i = low, j = high;
        while (i <= j) {
            while (keys[i] > pivot) i++;
            while (keys[j] < pivot) j--;
            if (i <= j) {
                uint64_t kept = keys[i];
                keys[i++] = keys[j];
                keys[j--] = kept;
            }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else return;
    }
}

/* Keeps the k best of all keys held; returns the worst of them. */
static uint64_t prune(struct row *row) {
    if (row->count > row->k) partition_best(row->kept, row->count, row->k);
    row->count = row->count < row->k ? row->count : row->k;
    uint64_t worst = UINT64_MAX;
    for (long i = 0; i < row->count; i++) worst = row->kept[i] < worst ? row->kept[i] : worst;
    return worst;
}

static void keep(struct row *row, float value, long index) {
    row->kept[row->count++] = key_of(value, index);
    /* The first k are kept whatever they are; then each time that space runs out. */
    if (row->count == row->room || index == row->k - 1) row->threshold = value_of(prune(row));
}

/* One look at a block: maxima of its groups (NaN is passed over), and the sum of its powers. */
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
        lanes all = larger(larger(most[0], most[1]), larger(most[2], most[3]));
        float best = all[0];
        for (int j = 1; j < LANES; j++) best = all[j] > best ? all[j] : best;
        maxima[g] = best;
        sums += __builtin_convertvector((part[0] + part[1]) + (part[2] + part[3]), wide_lanes);
    }
    double total = 0.0;
    for (int j = 0; j < LANES; j++) total += sums[j];
    return total;
}

static float largest_of(const float *values, long count) {
    float most = -INFINITY;
    for (long i = 0; i < count; i++) most = values[i] > most ? values[i] : most;
    return most;
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

/* Keeps what may be among the k best: the row's first k, then all that beat the threshold. */
static void collect(struct row *row, const float *x, const float *maxima, long start, long count) {
    long fixed = row->k - start < count ? row->k - start : count;
    for (long i = 0; i < fixed; i++) keep(row, x[i], start + i);
    for (long i = fixed > 0 ? fixed : 0; i < count && i % GROUP; i++)
        if (x[i] > row->threshold) keep(row, x[i], start + i);
    for (long g = fixed > 0 ? (fixed + GROUP - 1) / GROUP : 0; g * GROUP < count; g++) {
        if (!(maxima[g] > row->threshold)) continue;
        /* What fills up a block is -inf, and never beats anything. */
        for (const float *v = x + g * GROUP; v < x + (g + 1) * GROUP; v += LANES) {
            if (!any(lanes_at(v) > (lanes){0} + row->threshold)) continue;
            for (int j = 0; j < LANES; j++)
                if (v[j] > row->threshold) keep(row, v[j], start + (v - x) + j);
        }
    }
}

/* Powers above this are not trusted to float32. */
static const float HIGHEST = 100.0f;

/* A block of BLOCK elements, filled up with -inf, of which `count` belong to the row from `start`. */
static void take(struct row *row, const float *x, long start, long count, float scale) {
    float maxima[BLOCK / GROUP];
    float origin = row->largest > -INFINITY ? row->largest : largest_of(x, count);
    /* With the maximum so far as origin, most blocks are looked at once. */
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
    collect(row, x, maxima, start, count);
}

static const float *block_of(const void *logits, enum kind kind, long at, long count, float *room) {
    if (kind == FLOAT32) {
        const float *x = (const float *)logits + at;
        if (count == BLOCK) return x;
        memcpy(room, x, (size_t)count * sizeof *x);
    } else {
        const uint16_t *x = (const uint16_t *)logits + at;
        if (kind == BFLOAT16)
            for (long i = 0; i < count; i++) room[i] = float_of((uint32_t)x[i] << 16);
        else
            for (long i = 0; i < count; i++) room[i] = half_to_float(x[i]);
    }
    for (long i = count; i < BLOCK; i++) room[i] = -INFINITY;
    return room;
}

/* The order alone, with NaN in it: rare, so one element at a time. */
static void order_again(struct row *row, const void *logits, enum kind kind, long at, long width) {
    float room[BLOCK];
    uint64_t worst = 0;
    row->count = 0;
    for (long start = 0; start < width; start += BLOCK) {
        long count = width - start < BLOCK ? width - start : BLOCK;
        const float *x = block_of(logits, kind, at + start, count, room);
        for (long i = 0; i < count; i++) {
            uint64_t key = key_of(x[i], start + i);
            if (row->count >= row->k && key < worst) continue;
            row->kept[row->count++] = key;
            if (row->count == row->room) worst = prune(row);
        }
    }
}

/* Rows first .. last - 1. `scales` are log2(e) / temperature, `kept` has space for `room` keys. */
void softmax_topk(const void *logits, long kind, long stride, long width, const float *scales,
                  uint64_t *kept, long room, long k, float *values, int64_t *indices,
                  double *totals, long first, long last) {
    float block[BLOCK];
    for (long n = first; n < last; n++) {
        struct row row = {-INFINITY, 0.0, kept, 0, k, room, -INFINITY};
        for (long start = 0; start < width; start += BLOCK) {
            long count = width - start < BLOCK ? width - start : BLOCK;
            const float *x = block_of(logits, (enum kind)kind, n * stride + start, count, block);
            take(&row, x, start, count, scales[n]);
        }
        if (row.total != row.total) order_again(&row, logits, (enum kind)kind, n * stride, width);
        prune(&row);
        qsort(kept, (size_t)k, sizeof *kept, descending);
        for (long i = 0; i < k; i++) {
            values[n * k + i] = value_of(kept[i]);
            indices[n * k + i] = UINT32_MAX - (uint32_t)kept[i];
        }
        totals[n] = row.total;
    }
}
