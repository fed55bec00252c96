// One-pass kernels: what a masked row reduction costs when nothing stands between it and the machine.
//
// Plain loops for the compiler to vectorise (-O3 -march=native), one thread. Each reads x and its 1-byte mask, row by
// row, and writes into memory that the caller provides; what a row needs twice is still in the first-level cache.
// Invalid elements are replaced as they are loaded, so NaN under the mask costs and changes nothing.
#include <cmath>
#include <cstdint>
#include <limits>

using std::int64_t;
using std::int8_t;

namespace {

constexpr float lowest = -std::numeric_limits<float>::infinity();

// e^v for v ≤ 0 to about 2 ulp: 2^n · 2^f, a polynomial for the fraction and the exponent's bits for the rest (Cephes expf).
inline float exponential(float v) {
    v = v < -87.0f ? -87.0f : v;
    const float n = __builtin_rintf(v * 1.44269504f);
    const float r = (v - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const std::int32_t bits = (static_cast<std::int32_t>(n) + 127) << 23;
    float power;
    __builtin_memcpy(&power, &bits, 4);
    return p * power;
}

inline float or_else(float value, int8_t valid, float fill) { return valid ? value : fill; }

struct Moments {
    float mean, squares;  // squares: the sum of squared deviations
    int count;
};

inline float row_sum(const float* x, const int8_t* m, int64_t n) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; i++) total += or_else(x[i], m[i], 0);
    return total;
}

struct Total {
    float sum;
    int count;
};

inline Total row_total(const float* x, const int8_t* m, int64_t n) {
    float sum = 0;
    int count = 0;
#pragma omp simd reduction(+ : sum, count)
    for (int64_t i = 0; i < n; i++) {
        sum += or_else(x[i], m[i], 0);
        count += m[i] != 0;
    }
    return {sum, count};
}

inline int row_count(const int8_t* m, int64_t n) {
    int count = 0;
#pragma omp simd reduction(+ : count)
    for (int64_t i = 0; i < n; i++) count += m[i];
    return count;
}

inline float row_max(const float* x, const int8_t* m, int64_t n) {
    float largest = lowest;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; i++) {
        const float v = or_else(x[i], m[i], lowest);
        largest = v > largest ? v : largest;
    }
    return largest;
}

inline Moments row_moments(const float* x, const int8_t* m, int64_t n) {
    const Total total = row_total(x, m, n);
    const float mean = total.sum / total.count;
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; i++) {
        const float d = or_else(x[i] - mean, m[i], 0);
        squares += d * d;
    }
    return {mean, squares, total.count};
}

inline float row_exponentials(const float* x, const int8_t* m, int64_t n, float largest) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; i++) total += or_else(exponential(or_else(x[i], m[i], largest) - largest), m[i], 0);
    return total;
}

template <class Row>
inline void each_row(int64_t rows, Row row) {
    for (int64_t r = 0; r < rows; r++) row(r);
}

}  // namespace

extern "C" {

// ------------------------------------------------------------------------------- forward: out is [rows], or [rows, n]

void sum(const float* x, const int8_t* m, float* out, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) { out[r] = row_sum(x + r * n, m + r * n, n); });
}

void mean(const float* x, const int8_t* m, float* out, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
        const Total total = row_total(x + r * n, m + r * n, n);
        out[r] = total.sum / total.count;
    });
}

void var(const float* x, const int8_t* m, float* out, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
        const Moments row = row_moments(x + r * n, m + r * n, n);
        out[r] = row.squares / (row.count - 1);
    });
}

void std_(const float* x, const int8_t* m, float* out, int64_t rows, int64_t n) {
    var(x, m, out, rows, n);
    for (int64_t r = 0; r < rows; r++) out[r] = std::sqrt(out[r]);
}

void amax(const float* x, const int8_t* m, float* out, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) { out[r] = row_max(x + r * n, m + r * n, n); });
}

void logsumexp(const float* x, const int8_t* m, float* out, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
        const float largest = row_max(x + r * n, m + r * n, n);
        out[r] = largest + std::log(row_exponentials(x + r * n, m + r * n, n, largest));
    });
}

void softmax(const float* x, const int8_t* m, float* out, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
        const float* xr = x + r * n;
        const int8_t* mr = m + r * n;
        float* y = out + r * n;
        const float largest = row_max(xr, mr, n);
        float total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < n; i++) {
            const float e = or_else(exponential(or_else(xr[i], mr[i], largest) - largest), mr[i], 0);
            y[i] = e;
            total += e;
        }
        const float scale = 1 / total;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) y[i] *= scale;
    });
}

void layer_norm(const float* x, const int8_t* m, float* out, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
        const float* xr = x + r * n;
        const int8_t* mr = m + r * n;
        float* y = out + r * n;
        const Moments row = row_moments(xr, mr, n);
        const float scale = 1 / std::sqrt(row.squares / row.count + 1e-5f);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) y[i] = or_else((xr[i] - row.mean) * scale, mr[i], 0);
    });
}

// --------------------- backward: g is the gradient of out (and has its shape), y is out itself, dx is [rows, n]

void sum_backward(const float*, const int8_t* m, const float*, const float* g, float* dx, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) dx[r * n + i] = or_else(g[r], m[r * n + i], 0);
    });
}

void mean_backward(const float*, const int8_t* m, const float*, const float* g, float* dx, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
        const float share = g[r] / row_count(m + r * n, n);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) dx[r * n + i] = or_else(share, m[r * n + i], 0);
    });
}

static void deviations(const float* x, const int8_t* m, float factor, float mean, float* dx, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) dx[i] = or_else((x[i] - mean) * factor, m[i], 0);
}

void var_backward(const float* x, const int8_t* m, const float*, const float* g, float* dx, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
        const Total total = row_total(x + r * n, m + r * n, n);
        deviations(x + r * n, m + r * n, 2 * g[r] / (total.count - 1), total.sum / total.count, dx + r * n, n);
    });
}

void std__backward(const float* x, const int8_t* m, const float* y, const float* g, float* dx, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
        const Total total = row_total(x + r * n, m + r * n, n);
        deviations(x + r * n, m + r * n, g[r] / (y[r] * (total.count - 1)), total.sum / total.count, dx + r * n, n);
    });
}

// As torch has it, elements that tie for the maximum share its gradient.
void amax_backward(const float* x, const int8_t* m, const float* y, const float* g, float* dx, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
        const float* xr = x + r * n;
        const int8_t* mr = m + r * n;
        const float largest = y[r];
        int ties = 0;
#pragma omp simd reduction(+ : ties)
        for (int64_t i = 0; i < n; i++) ties += or_else(xr[i], mr[i], lowest) == largest;
        const float share = g[r] / ties;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) dx[r * n + i] = or_else(xr[i], mr[i], lowest) == largest ? share : 0;
    });
}

void logsumexp_backward(
    const float* x, const int8_t* m, const float* y, const float* g, float* dx, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
#pragma omp simd
        for (int64_t i = r * n; i < (r + 1) * n; i++)
            dx[i] = or_else(g[r] * exponential(or_else(x[i], m[i], y[r]) - y[r]), m[i], 0);
    });
}

void softmax_backward(const float*, const int8_t*, const float* y, const float* g, float* dx, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
        const float *yr = y + r * n, *gr = g + r * n;
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < n; i++) dot += yr[i] * gr[i];
#pragma omp simd
        for (int64_t i = 0; i < n; i++) dx[r * n + i] = yr[i] * (gr[i] - dot);
    });
}

void layer_norm_backward(
    const float* x, const int8_t* m, const float* y, const float* g, float* dx, int64_t rows, int64_t n) {
    each_row(rows, [=](int64_t r) {
        const float *yr = y + r * n, *gr = g + r * n;
        const int8_t* mr = m + r * n;
        const Moments row = row_moments(x + r * n, mr, n);
        const float scale = 1 / std::sqrt(row.squares / row.count + 1e-5f);
        float total = 0, dot = 0;
#pragma omp simd reduction(+ : total, dot)
        for (int64_t i = 0; i < n; i++) {
            const float gi = or_else(gr[i], mr[i], 0);
            total += gi;
            dot += gi * yr[i];
        }
        total /= row.count;
        dot /= row.count;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) dx[r * n + i] = or_else((gr[i] - total - yr[i] * dot) * scale, mr[i], 0);
    });
}

// Rows of a matrix in compressed storage: `ends` (rows + 1), `column` and `value` of each stored element.

void csr_sum(const int64_t* ends, const float* value, float* out, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        float total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t i = ends[r]; i < ends[r + 1]; i++) total += value[i];
        out[r] = total;
    }
}

void csr_amax(const int64_t* ends, const float* value, float* out, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        float greatest = lowest;
#pragma omp simd reduction(max : greatest)
        for (int64_t i = ends[r]; i < ends[r + 1]; i++) greatest = value[i] > greatest ? value[i] : greatest;
        out[r] = greatest;
    }
}

typedef float Vector __attribute__((vector_size(64), aligned(4)));

// out (rows, width) = matrix · dense (columns, width), width a multiple of 128: eight vectors stay in registers.
void csr_matmul(const int64_t* ends, const int64_t* column, const float* value, const float* dense, float* out,
                int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t w = 0; w < width; w += 128) {
            Vector total[8] = {};
            for (int64_t i = ends[r]; i < ends[r + 1]; i++) {
                const Vector* row = reinterpret_cast<const Vector*>(dense + column[i] * width + w);
                for (int j = 0; j < 8; j++) total[j] += value[i] * row[j];
            }
            Vector* result = reinterpret_cast<Vector*>(out + r * width + w);
            for (int j = 0; j < 8; j++) result[j] = total[j];
        }
    }
}
}
