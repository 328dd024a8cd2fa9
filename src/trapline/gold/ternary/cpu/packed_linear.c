/* y = x Wᵀ for packed ternary weights, read as they are stored.
 *
 * Activations are split, group by group of 128, into whole numbers of a unit, each off by at most
 * 2^-21.5 of the group's largest, and these into three int8 digits. The rest are sums of int8
 * products, for which CPUs have instructions. Rows of x below 1 are first multiplied by a power of
 * two, and their sums divided by it at the end: subnormal units would lose digits.
 *
 * Of a byte with the codes a, b, c, d, from its lowest bits on, fields are multiplied that are cut
 * out more cheaply than codes:
 *     4 (a A + b B) = (byte & 3) (4 A - B) + (byte & 15) B,     c and d alike after one shift.
 * So the digits are those of 4 A - B, B, 4 C - D and D.
 *
 * Nothing here needs -ffast-math, whose start-up code would change the arithmetic of the whole
 * process.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
/* -DPLAIN: as on a CPU without special instructions here. */
#if defined(__ARM_FEATURE_DOTPROD) && !defined(PLAIN)
#include <arm_neon.h>
#define DOT_PRODUCTS
#endif

enum { GROUP = 128, BYTES = GROUP / 4, HALF = BYTES / 2, DIGITS = 3, LANES = 4 };
/* Rows of the matrix a thread takes at a time; groups whose scales are converted at a time. */
enum { TAKEN = 64, AT_ONCE = 64, ALL_DIGITS = DIGITS * GROUP };
/* Five times it, the largest 4 A - B, is the largest number of three digits in base 256. */
static const float LARGEST = 1671142.0f;

#ifdef DOT_PRODUCTS
typedef __fp16 Half;
static inline float half_to_float(Half half) { return half; }
#else
typedef uint16_t Half;
static inline float half_to_float(Half half) {
    /* The float's exponent is rebiased by a multiplication; it is full where the half's is. */
    uint32_t bits = (uint32_t)(half & 0x7fffu) << 13, sign = (uint32_t)(half & 0x8000u) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    memcpy(&bits, &value, sizeof bits);
    bits |= sign | ((half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u);
    memcpy(&value, &bits, sizeof value);
    return value;
}
#endif

typedef struct {
    const float *x;         /* (count, columns) */
    const uint8_t *plane;   /* (rows, row_bytes) */
    const Half *scales;     /* (rows, groups) */
    float *y;               /* (count, rows) */
    int8_t *digits;         /* (count, groups, 3 digits, 2 halves, 4 fields, 16 bytes) */
    int32_t *less;          /* (count, groups, 4 lanes): stored codes are one too large */
    float *units;           /* (count, groups) */
    float *backs;           /* (count): inverse of the power of two of a row */
    long count, rows, columns, row_bytes, groups;
    long next; /* the next row of the matrix to take */
} Job;

/* NaN where a value is not finite. */
static float largest_of(const float *x, long count) {
    float largest = 0.0f;
    int finite = 1;
    for (long i = 0; i < count; i++) {
        float size = fabsf(x[i]);
        finite &= size <= FLT_MAX;
        largest = size > largest ? size : largest;
    }
    return finite ? largest : NAN;
}

/* The power of two that brings the largest between a half and 1, or as near as possible. */
static float lift_of(float largest) {
    int exponent;
    if (!(largest > 0.0f && largest < 0.5f)) return 1.0f;
    frexpf(largest, &exponent);
    return ldexpf(1.0f, exponent > -126 ? -exponent : 126);
}

/* `unit` holds the group's largest before. */
static void split_group(const float *x, long count, float lift, int8_t *digits, int32_t *less,
                        float *unit) {
    int32_t whole[4][BYTES] = {{0}};
    float least = *unit * lift / LARGEST;
    *unit = least < FLT_MIN ? FLT_MIN : least;
    if (!isnan(*unit)) /* with a NaN unit, zeros suffice: zero times NaN is NaN */
        for (long i = 0; i < count; i++)
            whole[i & 3][i >> 2] = (int32_t)rintf(x[i] * lift / *unit);
    memset(less, 0, LANES * sizeof *less);
    for (int j = 0; j < BYTES; j++)
        less[j / 4 % LANES] -= 4 * (whole[0][j] + whole[1][j] + whole[2][j] + whole[3][j]);
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 4; k++, digits += HALF)
            for (int j = 0; j < HALF; j++) {
                const int32_t *one = &whole[k][half * HALF + j];
                int32_t all = k & 1 ? *one : 4 * *one - one[BYTES];
                int32_t low = (int8_t)all, rest = (all - low) >> 8, middle = (int8_t)rest;
                digits[j] = (int8_t)low;
                digits[GROUP + j] = (int8_t)middle;
                digits[2 * GROUP + j] = (int8_t)((rest - middle) >> 8);
            }
}

/* The digits of all rows of x: once, before any thread calls `work`. */
void split(Job *job) {
    for (long m = 0; m < job->count; m++) {
        const float *x = job->x + m * job->columns;
        float *units = job->units + m * job->groups;
        long whole = job->columns / GROUP, rest = job->columns % GROUP;
        for (long g = 0; g < job->groups; g++)
            units[g] = largest_of(x + g * GROUP, g < whole ? GROUP : rest);
        float lift = lift_of(largest_of(units, job->groups));
        job->backs[m] = 1.0f / lift;
        for (long g = 0; g < job->groups; g++) {
            long at = m * job->groups + g;
            split_group(x + g * GROUP, g < whole ? GROUP : rest, lift,
                        job->digits + at * ALL_DIGITS, job->less + at * LANES, units + g);
        }
    }
}

#ifdef DOT_PRODUCTS
typedef float32x4_t Sum;
typedef struct {
    int32x4_t low, middle, high;
} Parts;

static inline Sum nothing(void) { return vdupq_n_f32(0.0f); }
static inline float total_of(Sum sum) { return vaddvq_f32(sum); }

static inline int8x16_t field(const uint8_t *bytes, int k) {
    uint8x16_t byte = vld1q_u8(bytes), moved = k < 2 ? byte : vshrq_n_u8(byte, 4);
    return vreinterpretq_s8_u8(k == 3 ? moved : vandq_u8(moved, vdupq_n_u8(k == 1 ? 15 : 3)));
}

static inline void add_field(Parts *sums, int8x16_t cut, const int8_t *digits) {
    sums->low = vdotq_s32(sums->low, cut, vld1q_s8(digits));
    sums->middle = vdotq_s32(sums->middle, cut, vld1q_s8(digits + GROUP));
    sums->high = vdotq_s32(sums->high, cut, vld1q_s8(digits + 2 * GROUP));
    /* Compilers would compute the sums one after the other, each waiting for the one before. */
    __asm__ volatile("" : "+w"(sums->low), "+w"(sums->middle), "+w"(sums->high));
}

/* sums[r][c] += factor · one group of row r of the matrix · row c of x; rows lie `stride` apart. */
static inline __attribute__((always_inline)) void add_group(
    const int ROWS, const int COUNT, Sum sums[4][2], const uint8_t *bytes, long stride,
    const int8_t *digits, const int32_t *less, const float *factors, long groups) {
    Parts parts[4][2];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COUNT; c++) {
            parts[r][c].low = vld1q_s32(less + c * groups * LANES);
            parts[r][c].middle = parts[r][c].high = vdupq_n_s32(0);
        }
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 4; k++)
            for (int c = 0; c < COUNT; c++)
                for (int r = 0; r < ROWS; r++)
                    add_field(&parts[r][c], field(bytes + r * stride + half * HALF, k),
                              digits + c * groups * ALL_DIGITS + (half * 4 + k) * HALF);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COUNT; c++) {
            int32x4_t whole = vaddq_s32(parts[r][c].low, vshlq_n_s32(parts[r][c].middle, 8));
            whole = vaddq_s32(whole, vshlq_n_s32(parts[r][c].high, 16));
            float factor = factors[(r * COUNT + c) * AT_ONCE];
            sums[r][c] = vfmaq_n_f32(sums[r][c], vcvtq_f32_s32(whole), factor);
        }
}
#else
typedef float Sum;
/* The first factor of the byte products is unsigned. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
typedef uint8_t Field;
#else
typedef int8_t Field;
#endif

static inline Sum nothing(void) { return 0.0f; }
static inline float total_of(Sum sum) { return sum; }

/* Loops that compilers translate into byte products of the CPU. */
static int32_t whole_product(const uint8_t *restrict bytes, const int8_t *restrict digits,
                             const int32_t *restrict less) {
    Field fields[GROUP];
    int32_t low = less[0] + less[1] + less[2] + less[3], middle = 0, high = 0;
    for (int half = 0; half < 2; half++, bytes += HALF)
        for (int j = 0; j < HALF; j++) {
            fields[half * 4 * HALF + j] = bytes[j] & 3;
            fields[half * 4 * HALF + HALF + j] = bytes[j] & 15;
            fields[half * 4 * HALF + 2 * HALF + j] = bytes[j] >> 4 & 3;
            fields[half * 4 * HALF + 3 * HALF + j] = bytes[j] >> 4;
        }
    for (int j = 0; j < GROUP; j++) {
        low += fields[j] * digits[j];
        middle += fields[j] * digits[GROUP + j];
        high += fields[j] * digits[2 * GROUP + j];
    }
    return low + 256 * middle + 65536 * high;
}

static inline __attribute__((always_inline)) void add_group(
    const int ROWS, const int COUNT, Sum sums[4][2], const uint8_t *bytes, long stride,
    const int8_t *digits, const int32_t *less, const float *factors, long groups) {
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COUNT; c++)
            sums[r][c] += factors[(r * COUNT + c) * AT_ONCE] *
                          (float)whole_product(bytes + r * stride, digits + c * groups * ALL_DIGITS,
                                               less + c * groups * LANES);
}
#endif

/* factors[r][c][g - begin]: scale of row n + r times unit of row m + c of x; sums are fourfold. */
static inline __attribute__((always_inline)) void convert_scales(
    const Job *job, const int ROWS, const int COUNT, long n, long m, long begin, long end,
    float *restrict factors) {
    for (int r = 0; r < ROWS; r++) {
        const Half *restrict scales = job->scales + (n + r) * job->groups + begin;
        float converted[AT_ONCE];
        for (long g = 0; g < end - begin; g++) converted[g] = half_to_float(scales[g]) * 0.25f;
        for (int c = 0; c < COUNT; c++, factors += AT_ONCE) {
            const float *restrict units = job->units + (m + c) * job->groups + begin;
            for (long g = 0; g < end - begin; g++) factors[g] = converted[g] * units[g];
        }
    }
}

/* ROWS rows of the matrix from n on times COUNT rows of x from m on. */
static inline __attribute__((always_inline)) void multiply(const Job *job, const int ROWS,
                                                           const int COUNT, long n, long m) {
    long groups = job->groups, stride = job->row_bytes, whole = stride / BYTES;
    const uint8_t *bytes = job->plane + n * stride;
    const int8_t *digits = job->digits + m * groups * ALL_DIGITS;
    const int32_t *less = job->less + m * groups * LANES;
    Sum sums[4][2];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COUNT; c++) sums[r][c] = nothing();
    for (long begin = 0; begin < groups; begin += AT_ONCE) {
        long end = groups - begin < AT_ONCE ? groups : begin + AT_ONCE;
        float factors[4 * AT_ONCE];
        convert_scales(job, ROWS, COUNT, n, m, begin, end, factors);
        for (long g = begin; g < end && g < whole; g++) {
            for (int r = 0; r < ROWS; r++) /* the rows after these */
                __builtin_prefetch(bytes + g * BYTES + (r + ROWS) * stride);
            add_group(ROWS, COUNT, sums, bytes + g * BYTES, stride, digits + g * ALL_DIGITS,
                      less + g * LANES, factors + g - begin, groups);
        }
        if (end > whole) { /* a short last group: nothing beyond the row is read */
            uint8_t last[4 * BYTES] = {0};
            for (int r = 0; r < ROWS; r++)
                memcpy(last + r * BYTES, bytes + r * stride + whole * BYTES,
                       (size_t)(stride - whole * BYTES));
            add_group(ROWS, COUNT, sums, last, BYTES, digits + whole * ALL_DIGITS,
                      less + whole * LANES, factors + whole - begin, groups);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COUNT; c++)
            job->y[(m + c) * job->rows + n + r] = total_of(sums[r][c]) * job->backs[m + c];
}

static void four_by_one(const Job *job, long n, long m) { multiply(job, 4, 1, n, m); }
static void two_by_two(const Job *job, long n, long m) { multiply(job, 2, 2, n, m); }
static void one_by_one(const Job *job, long n, long m) { multiply(job, 1, 1, n, m); }

static void multiply_rows(const Job *job, long n, long last) {
    for (; n + 4 <= last; n += 4) {
        long m = 0;
        for (; m + 2 <= job->count; m += 2) {
            two_by_two(job, n, m);
            two_by_two(job, n + 2, m);
        }
        if (m < job->count) four_by_one(job, n, m);
    }
    for (; n < last; n++)
        for (long m = 0; m < job->count; m++) one_by_one(job, n, m);
}

/* Takes rows of the matrix until none is left; any number of threads may run this at once. */
void work(Job *job) {
    for (;;) {
        long first = __atomic_fetch_add(&job->next, TAKEN, __ATOMIC_RELAXED);
        if (first >= job->rows) return;
        multiply_rows(job, first, job->rows - first < TAKEN ? job->rows : first + TAKEN);
    }
}
