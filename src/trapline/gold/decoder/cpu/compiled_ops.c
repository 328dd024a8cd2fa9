/* The operations of a decoding step between its matrix products, one new token a row, in float32.
 *
 * In torch these are a dozen operations a layer of a few kilobytes each: dispatch costs more than the
 * work, and pages are copied before they are read. Here they are read in place.
 */
#include <math.h>
#include <string.h>

enum { LANES = 4, BLOCK = 64, QUERIES = 8 };
typedef float lanes __attribute__((vector_size(4 * LANES)));

static float dot(const float *a, const float *b, long width) {
    lanes sums[4] = {{0}};
    float total = 0.0f, parts[LANES];
    long d = 0;
    for (; d + 4 * LANES <= width; d += 4 * LANES)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            lanes left, right;
            memcpy(&left, a + d + i * LANES, sizeof left);
            memcpy(&right, b + d + i * LANES, sizeof right);
            sums[i] += left * right;
        }
    for (; d < width; d++) total += a[d] * b[d];
    lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    memcpy(parts, &all, sizeof all);
    return total + ((parts[0] + parts[2]) + (parts[1] + parts[3]));
}

/* y = x / rms(x) * weight; y may be x. */
static void normed(const float *x, const float *weight, float *y, long width, double eps) {
    double squares = 0.0;
    for (long d = 0; d < width; d++) squares += (double)x[d] * x[d];
    float scale = (float)(1.0 / sqrt(squares / width + eps));
    for (long d = 0; d < width; d++) y[d] = x[d] * scale * weight[d];
}

/* sum = x + delta and y = norm of it, row by row. */
void add_norm(
    const float *x, const float *delta, const float *weight, float *sum, float *y, long rows, long width,
    double eps) {
    for (long r = 0; r < rows; r++, x += width, delta += width, sum += width, y += width) {
        for (long d = 0; d < width; d++) sum[d] = x[d] + delta[d];
        normed(sum, weight, y, width, eps);
    }
}

/* RoPE: element d rotates with element d + width / 2. */
static void turned(float *x, const float *cosine, const float *sine, long width) {
    long half = width / 2;
    for (long d = 0; d < half; d++) {
        float left = x[d], right = x[d + half];
        x[d] = left * cosine[d] - right * sine[d];
        x[d + half] = right * cosine[d] + left * sine[d];
    }
}

/* Copies heads, normed if there are weights and rotated if there are angles. */
static void taken(
    const float *from, float *to, const float *norm, const float *cosine, const float *sine, long heads,
    long width, double eps) {
    memcpy(to, from, heads * width * sizeof *to);
    for (long h = 0; h < heads; h++, to += width) {
        if (norm) normed(to, norm, to, width, eps);
        if (cosine) turned(to, cosine, sine, width);
    }
}

/* Splits `qkv` (rows, heads + 2 groups, width): queries go to `q`, keys and values to their slots. */
void rope_and_append(
    const float *qkv, const float *cosine, const float *sine, const float *q_norm, const float *k_norm,
    const long long *positions, const long long *slots, float *q, float *keys, float *values, long rows,
    long heads, long groups, long width, double eps) {
    long row = groups * width;
    for (long b = 0; b < rows; b++, qkv += heads * width + 2 * row, q += heads * width) {
        long angle = positions[b] * (width / 2);
        const float *cos = cosine ? cosine + angle : 0, *sin = sine ? sine + angle : 0;
        const float *k = qkv + heads * width, *v = k + row;
        taken(qkv, q, q_norm, cos, sin, heads, width, eps);
        if (slots[b] < 0) continue;
        taken(k, keys + slots[b] * row, k_norm, cos, sin, groups, width, eps);
        memcpy(values + slots[b] * row, v, row * sizeof *values);
    }
}

/* One layer's rows. A page has `page` positions, one after the other, of `groups` heads each. */
struct pages {
    const float *keys, *values;
    long page, groups, width;
    float scale, softcap; /* softcap c: a score s becomes c tanh(s / c); 0: as it is */
};

/* Where one head's part of positions `start` to `start + count - 1` begins. */
static void find(
    const struct pages *at, const int *table, long group, long start, long count, long *places) {
    long page = start / at->page, inside = start % at->page;
    for (long i = 0; i < count; i++, inside++) {
        if (inside == at->page) page++, inside = 0;
        places[i] = ((table[page] * at->page + inside) * at->groups + group) * at->width;
    }
}

/* out += the weighted sum of rows, four at a time, so that `out` is read and written less often. */
static void add_rows(
    float *out, const float *rows, const long *places, const float *weights, long count, long width) {
    long i = 0;
    for (; i + 4 <= count; i += 4) {
        const float *a = rows + places[i], *b = rows + places[i + 1];
        const float *c = rows + places[i + 2], *d = rows + places[i + 3], *w = weights + i;
        for (long e = 0; e < width; e++)
            out[e] += (w[0] * a[e] + w[1] * b[e]) + (w[2] * c[e] + w[3] * d[e]);
    }
    for (; i < count; i++)
        for (long e = 0; e < width; e++) out[e] += weights[i] * rows[places[i] + e];
}

/* A running softmax: the maximum that `out` is scaled by, and the sum to divide by at the end. */
struct sofar {
    float highest, total;
};

/* Adds more positions to the running softmax of one query. */
static void meet(
    const float *q, const struct pages *at, const long *places, long count, struct sofar *sofar,
    float *out) {
    const float cap = at->softcap;
    float weights[BLOCK], highest = sofar->highest;
    for (long i = 0; i < count; i++) {
        weights[i] = dot(q, at->keys + places[i], at->width) * at->scale;
        if (cap) weights[i] = cap * tanhf(weights[i] / cap);
        highest = weights[i] > highest ? weights[i] : highest;
    }
    /* Until a score is finite nothing is subtracted: inf - inf is NaN. */
    float base = highest > -INFINITY ? highest : 0.0f, shrunk = expf(sofar->highest - base);
    sofar->highest = highest;
    sofar->total *= shrunk;
    for (long d = 0; d < at->width; d++) out[d] *= shrunk;
    for (long i = 0; i < count; i++) sofar->total += weights[i] = expf(weights[i] - base);
    add_rows(out, at->values, places, weights, count, at->width);
}

/* Queries of one row that share a head of keys, over positions `from` to `to` - 1, block by block: a
 * block stays in the cache for all of these queries. */
static void attend_group(
    const float *q, const struct pages *at, const int *table, long group, long queries, long from,
    long to, float *out) {
    struct sofar sofar[QUERIES];
    long places[BLOCK], width = at->width;
    memset(out, 0, queries * width * sizeof *out);
    for (long i = 0; i < queries; i++) sofar[i] = (struct sofar){-INFINITY, 0.0f};
    for (long start = from; start < to; start += BLOCK) {
        long count = to - start < BLOCK ? to - start : BLOCK;
        find(at, table, group, start, count, places);
        for (long i = 0; i < queries; i++)
            meet(q + i * width, at, places, count, sofar + i, out + i * width);
    }
    if (from == to) return; /* empty range: zeros */
    for (long i = 0; i < queries; i++)
        for (long d = 0; d < width; d++) out[i * width + d] /= sofar[i].total;
}

struct job {
    const float *q, *keys, *values;
    const int *table, *lengths;
    float *out;
    long columns, page, heads, groups, width;
    long window;      /* number of last positions to attend to; 0: all */
    long items, next; /* groups of all rows; the next one to take */
    float scale, softcap;
};

static void attend_item(const struct job *job, long item) {
    struct pages at = {job->keys, job->values, job->page, job->groups, job->width,
                       job->scale, job->softcap};
    long b = item / job->groups, each = job->heads / job->groups, to = job->lengths[b];
    long from = job->window && to > job->window ? to - job->window : 0;
    for (long done = 0; done < each; done += QUERIES) {
        long queries = each - done < QUERIES ? each - done : QUERIES;
        long place = (item * each + done) * job->width;
        attend_group(
            job->q + place, &at, job->table + b * job->columns, item % job->groups, queries, from, to,
            job->out + place);
    }
}

/* Takes groups of rows until none is left; any number of threads may run this at once. */
void attend(struct job *job) {
    for (;;) {
        long item = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (item >= job->items) return;
        attend_item(job, item);
    }
}
