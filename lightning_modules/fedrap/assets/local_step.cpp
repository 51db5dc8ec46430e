// The passes over a block's rows: two make up one local SGD step in closed form, one hands the
// common rows to the server, one puts the personal rows back.
//
// Compiled with -DREAL=float|double -DWIDTH=k. `personal` and `common` are the padded tables
// (clients, rows, WIDTH), of which client c owns the first count[c] rows; everything per row is
// (clients, rows). Clients with step[c] == 0 have stopped and are left alone. What happens between
// the two passes, from logits to slopes, is done by the caller.

#include <cmath>
#include <cstdint>

using real = REAL;
constexpr int K = WIDTH;

static inline real sign(real x) { return real(x > 0) - real(x < 0); }

// logits[c, r] = <u_c, D + C> + b_c
// penalty[c]   = sum over rows of scale * (l1 |C| + l2 C^2 - independence (D - C)^2)
extern "C" void score_rows(
    int64_t clients, int64_t rows, const int64_t* count, const real* step,
    const real* personal, const real* common, const real* vector, const real* bias,
    const real* scale, double independence, double l1, double l2, real* logits, real* penalty) {
  const real away(independence), absolute(l1), square(l2);
  for (int64_t c = 0; c < clients; ++c) {
    if (step[c] == 0) continue;
    const real* u = vector + c * K;
    real sums[K] = {};
    for (int64_t r = c * rows; r < c * rows + count[c]; ++r) {
      const real *D = personal + r * K, *C = common + r * K;
      real logit = 0;
#pragma omp simd reduction(+ : logit)
      for (int k = 0; k < K; ++k) {
        const real apart = D[k] - C[k];
        logit += u[k] * (D[k] + C[k]);
        sums[k] += scale[r] * (absolute * std::abs(C[k]) + square * C[k] * C[k]
                               - away * apart * apart);
      }
      logits[r] = logit + bias[c];
    }
    penalty[c] = 0;
    for (int k = 0; k < K; ++k) penalty[c] += sums[k];
  }
}

// vector_gradient[c] = sum over rows of slope * (D + C), and one SGD step on both tables:
//   dD = slope u - 2 independence scale (D - C) + decay_personal D
//   dC = slope u + 2 independence scale (D - C) + scale (l1 sign(C) + 2 l2 C) + decay_common C
extern "C" void update_rows(
    int64_t clients, int64_t rows, const int64_t* count, const real* step,
    real* personal, real* common, const real* vector, const real* slope, const real* scale,
    double lr_personal, double lr_common, double decay_personal, double decay_common,
    double independence, double l1, double l2, real* vector_gradient) {
  for (int64_t c = 0; c < clients; ++c) {
    if (step[c] == 0) continue;
    const real* u = vector + c * K;
    const real rate_d = step[c] * real(lr_personal), rate_c = step[c] * real(lr_common);
    const real keep_d = 1 - rate_d * real(decay_personal);
    real gradient[K] = {};
    for (int64_t r = c * rows; r < c * rows + count[c]; ++r) {
      real *D = personal + r * K, *C = common + r * K;
      const real g = slope[r], push = 2 * real(independence) * scale[r];
      const real keep_c = 1 - rate_c * (real(decay_common) + 2 * real(l2) * scale[r]);
      const real shrink = rate_c * real(l1) * scale[r];
#pragma omp simd
      for (int k = 0; k < K; ++k) {
        const real d = D[k], x = C[k], apart = push * (d - x);
        gradient[k] += g * (d + x);
        D[k] = keep_d * d - rate_d * (g * u[k] - apart);
        C[k] = keep_c * x - rate_c * (g * u[k] + apart) - shrink * sign(x);
      }
    }
    for (int k = 0; k < K; ++k) vector_gradient[c * K + k] = gradient[k];
  }
}

// sum[item] += weight * (final - decay * start), and gained[c] = how many more entries of `final`
// than of `decay * start` lie above the threshold in magnitude.
extern "C" void collect_rows(
    int64_t clients, int64_t rows, const int64_t* count, const int64_t* item, const real* start,
    const real* final, const real* decay, const double* weight, double threshold, double* sum,
    int64_t* gained) {
  const real limit(threshold);
  for (int64_t c = 0; c < clients; ++c) {
    real more[K] = {};
    for (int64_t r = c * rows; r < c * rows + count[c]; ++r) {
      const real *before = start + r * K, *after = final + r * K;
      double* total = sum + item[r] * K;
#pragma omp simd
      for (int k = 0; k < K; ++k) {
        const real untouched = decay[c] * before[k];
        more[k] += real(std::abs(after[k]) > limit) - real(std::abs(untouched) > limit);
        total[k] += weight[c] * double(after[k] - untouched);
      }
    }
    real all = 0;
    for (int k = 0; k < K; ++k) all += more[k];
    gained[c] = int64_t(all);
  }
}

// tables[client[c]] *= decay[c] as a whole, then its touched rows are set to `final`.
extern "C" void store_rows(
    int64_t clients, int64_t rows, const int64_t* count, const int64_t* item, const int64_t* client,
    const real* final, const real* decay, int64_t items, real* tables) {
  for (int64_t c = 0; c < clients; ++c) {
    real* table = tables + client[c] * items * K;
    if (decay[c] != 1)
      for (int64_t i = 0; i < items * K; ++i) table[i] *= decay[c];
    for (int64_t r = c * rows; r < c * rows + count[c]; ++r)
      for (int k = 0; k < K; ++k) table[item[r] * K + k] = final[r * K + k];
  }
}
