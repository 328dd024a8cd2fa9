/* y = W x for packed ternary weights, read as they are stored.
 *
 * Activations are split, group by group of 128, into three signed digits: x = unit * (d0 * 2^14 +
 * d1 * 2^7 + d2), an error of at most 2^-21 of the group's largest value. What remains are sums of
 * int8 products, which compilers turn into dot-product instructions on every CPU that has some.
 * Nothing here needs -ffast-math, whose start-up code would change the arithmetic of the whole
 * process.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { GROUP = 128, BYTES = GROUP / 4, DIGITS = 3 };

static inline float half_to_float(uint16_t half) {
    /* Scales are never negative. The float's exponent is rebiased by a multiplication. */
    uint32_t bits = (uint32_t)(half & 0x7fffu) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value * 0x1p112f;
}

/* x (columns) -> digits (groups, 3, 4, 32): place j of part k belongs to code k of byte j. */
void split(const float *x, long columns, long groups, int8_t *digits, float *units, int32_t *sums) {
    for (long g = 0; g < groups; g++, digits += DIGITS * GROUP) {
        long count = columns - g * GROUP < GROUP ? columns - g * GROUP : GROUP;
        const float *part = x + g * GROUP;
        float largest = 0.0f;
        int finite = 1;
        for (long i = 0; i < count; i++) {
            float size = fabsf(part[i]);
            finite &= size <= 0x1.fffffep127f;
            largest = size > largest ? size : largest;
        }
        memset(digits, 0, DIGITS * GROUP);
        sums[g] = 0;
        units[g] = finite ? largest / (126.0f * 16384.0f) : NAN;
        if (!finite || units[g] == 0.0f) continue;
        for (long i = 0; i < count; i++) {
            int32_t whole = (int32_t)lrintf(part[i] / units[g]);
            int32_t high = (whole + 8192) >> 14, rest = whole - (high << 14);
            int32_t middle = (rest + 64) >> 7;
            int8_t *place = digits + (i & 3) * BYTES + (i >> 2);
            place[0] = (int8_t)high;
            place[GROUP] = (int8_t)middle;
            place[2 * GROUP] = (int8_t)(rest - (middle << 7));
            sums[g] += whole;
        }
    }
}

static float group_product(const uint8_t *restrict bytes, const int8_t *restrict digits,
                           int32_t sum) {
    int8_t codes[GROUP];
    int32_t high = 0, middle = 0, low = 0;
    for (int j = 0; j < BYTES; j++) {
        codes[j] = bytes[j] & 3;
        codes[BYTES + j] = (bytes[j] >> 2) & 3;
        codes[2 * BYTES + j] = (bytes[j] >> 4) & 3;
        codes[3 * BYTES + j] = bytes[j] >> 6;
    }
    for (int j = 0; j < GROUP; j++) {
        high += codes[j] * digits[j];
        middle += codes[j] * digits[GROUP + j];
        low += codes[j] * digits[2 * GROUP + j];
    }
    /* Stored is code + 1: the sum of all activations is one too many of each. */
    return (float)(high * 16384 + middle * 128 + low - sum);
}

/* Rows first .. last - 1 of y; plane (rows, row_bytes), scales (rows, groups) as float16 bits. */
void multiply(const uint8_t *plane, const uint16_t *scales, const int8_t *digits,
              const float *units, const int32_t *sums, float *y, long first, long last,
              long row_bytes, long groups) {
    long whole = row_bytes / BYTES;
    for (long n = first; n < last; n++) {
        const uint8_t *row = plane + n * row_bytes;
        const uint16_t *scale = scales + n * groups;
        float total = 0.0f;
        for (long g = 0; g < whole; g++)
            total += half_to_float(scale[g]) * units[g] *
                     group_product(row + g * BYTES, digits + g * DIGITS * GROUP, sums[g]);
        if (whole < groups) {
            uint8_t tail[BYTES] = {0};
            memcpy(tail, row + whole * BYTES, (size_t)(row_bytes - whole * BYTES));
            total += half_to_float(scale[whole]) * units[whole] *
                     group_product(tail, digits + whole * DIGITS * GROUP, sums[whole]);
        }
        y[n] = total;
    }
}
