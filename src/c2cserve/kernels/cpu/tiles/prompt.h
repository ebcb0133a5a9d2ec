// Attention of many rows of one sequence on tiles: a prompt's. Rows lie in the lanes of vectors, so
// that peaks, weights and totals of 16 rows take no step across lanes.
//
//   scores   [64 keys][16 rows]     A = k [16 keys][32 dimensions]     B = q in pairs of dimensions
//   weights  [32 pairs of keys][16 rows][2]                            as tiles take them for B
//   sums     [dimensions][16 rows]  A = v [16 dimensions][32 keys]     B = weights
//
// Keys and values have been laid out for all tasks. 32 rows walk along a split of them. Weights of
// one chunk are computed between the products of its neighbours: scores of the next one, and sums
// of the one before. A product's bits do not depend on which of its factors is A. So all is as
// `tiles/chunks.h` computes it, whose rows are few.
#pragma once
#include "../attention/chunk_rules.h"
#include "../threads.h"
#include "prompt_rows.h"

namespace c2c::chunks {

constexpr int kSplitChunks = kSplit / kBlocks;

class Prompt {
 public:
  static Prompt& of_thread() {
    thread_local std::unique_ptr<Prompt> prompt(new Prompt());
    return *prompt;
  }

  // All splits of a task, and its output.
  void attend(const AttentionArgs& a, const Task& task, const Layout& layout) {
    layout_ = &layout;
    begin(a, task);
    [[maybe_unused]] const tiles::Session session;
    for (int64_t split = task.split_from; split < task.split_to; ++split)
      for (int64_t at = 0; at < rows_.count(); at += kWalk)
        if (walk(at, split)) merge(at);
    end(a);
  }

 private:
  static constexpr int kParts = kRows / kLanes;
  static constexpr int kSquare = kRows * kRows;  // float32 values of C
  static constexpr int kScores = kKeys * kRows;

  // What a row has gathered, 16 rows at a time: sums, totals (16 equal lines), peaks.
  int64_t state() const { return (lines_ + 1) * kSquare + kRows; }
  float* totals(float* sums) const { return sums + lines_ * kSquare; }
  float* peaks(float* sums) const { return sums + (lines_ + 1) * kSquare; }

  void begin(const AttentionArgs& a, const Task& task) {
    dim_ = a.kv.head_dim;
    steps_ = (dim_ + kWidth - 1) / kWidth;
    lines_ = (dim_ + kRows - 1) / kRows;
    scale_ = a.scale * kLog2e;
    rows_.begin(a, task);
    const int64_t groups = rows_.count() / kRows;
    gathered_ = state_room_.room((groups + kSide) * state());
    sums_ = gathered_ + groups * state();
    for (int64_t g = 0; g < groups; ++g) std::fill_n(totals(gathered_ + g * state()), kRows, 0.0f);
    std::fill_n(ones_, kTile, bf16{0x3f80});
  }

  // The rows from `at` on along a split. Returns whether they see a key of it.
  bool walk(int64_t at, int64_t split) {
    const int32_t *first = rows_.firsts(at), *last = rows_.positions(at);
    const int64_t from = *std::min_element(first, first + kWalk);
    const int64_t to = *std::max_element(last, last + kWalk);
    const int64_t begin = std::max(from / kKeys, split * kSplitChunks);
    const int64_t end = std::min(to / kKeys + 1, (split + 1) * kSplitChunks);
    if (begin >= end) return false;
    // Chunks that all rows see whole lie in [clear, veiled).
    const int64_t clear = (*std::max_element(first, first + kWalk) + kKeys - 1) / kKeys;
    const int64_t veiled = (*std::min_element(last, last + kWalk) + 1) / kKeys;
    q_ = rows_.queries(at);
    for (int g = 0; g < kSide; ++g)
      std::fill_n(peaks(sums_ + g * state()), kRows, -std::numeric_limits<float>::infinity());
    fresh_ = true;
    for (int64_t i = 0; i < 2 * steps_; ++i) score_step(begin, i);
    for (int64_t chunk = begin; chunk < end; ++chunk)
      weigh(chunk, chunk < clear || chunk >= veiled ? at : -1, chunk + 1 < end, chunk > begin);
    gather_begin(end - 1);
    for (int64_t i = 0; i < gather_steps(); ++i) gather_step(end - 1, i);
    return true;
  }

  // A chunk's scores to weights. Between its pieces come the products of the next chunk's scores
  // and of the sums of the chunk before. `veiled`: the first row, if some row sees it in part.
  void weigh(int64_t chunk, int64_t veiled, bool scores_next, bool gathers_last) {
    constexpr int kPieces = kSide * (1 + kBlocks);
    const int64_t scores = scores_next ? 2 * steps_ : 0;
    const int64_t all = scores + (gathers_last ? gather_steps() : 0);
    if (gathers_last) gather_begin(chunk - 1);
    int64_t done = 0;
    int piece = 0;
    const auto products = [&] {
      for (const int64_t due = all * ++piece / kPieces; done < due; ++done)
        if (done < scores)
          score_step(chunk + 1, done);
        else
          gather_step(chunk - 1, done - scores);
    };
    for (int g = 0; g < kSide; ++g) {
      if (veiled >= 0) veil(chunk, g, veiled + g * kRows);
      find_peaks(chunk, g);
      products();
      for (int block = 0; block < kBlocks; ++block) {
        raise(chunk, g, block);
        products();
      }
    }
  }

  float* scores(int64_t chunk, int g) { return scores_ + (chunk % 2 * kSide + g) * kScores; }
  bf16* weights(int64_t chunk, int g) {
    return weights_ + (chunk % 2 * kSide + g) * kHalves * kTile;
  }
  float* shrink(int64_t chunk, int g) { return shrink_ + (chunk % 2 * kSide + g) * kRows; }

  // Scores that a row does not see: their weights are zero.
  void veil(int64_t chunk, int g, int64_t row) {
    float* line = scores(chunk, g);
    const int32_t begin = int32_t(chunk * kKeys);
    const vec hidden = splat(-std::numeric_limits<float>::infinity());
    for (int key = 0; key < kKeys; ++key, line += kRows)
      for (int p = 0; p < kParts; ++p) {
        const int64_t lanes = row + p * kLanes;
        const uint32_t sees =
            lanes_that_see(rows_.firsts(lanes), rows_.positions(lanes), begin + key);
        store(line + p * kLanes, select(sees, load(line + p * kLanes), hidden));
      }
  }

  static uint32_t lanes_that_see(const int32_t* first, const int32_t* position, int32_t key) {
#if defined(__AVX512F__)
    const __m512i at = _mm512_set1_epi32(key);
    return _mm512_mask_cmp_epi32_mask(
        _mm512_cmp_epi32_mask(_mm512_loadu_si512(first), at, _MM_CMPINT_LE), at,
        _mm512_loadu_si512(position), _MM_CMPINT_LE);
#else
    uint32_t bits = 0;
    for (int l = 0; l < kLanes; ++l) bits |= uint32_t(first[l] <= key && key <= position[l]) << l;
    return bits;
#endif
  }

  void find_peaks(int64_t chunk, int g) {
    float *peak = peaks(sums_ + g * state()), *less = shrink(chunk, g);
    bool& shrinks = shrinks_[chunk % 2][g] = false;
    for (int p = 0; p < kParts; ++p, peak += kLanes, less += kLanes) {
      const float* line = scores(chunk, g) + p * kLanes;
      vec best[4];
      for (int i = 0; i < 4; ++i) best[i] = load(line + i * kRows);
      for (int key = 4; key < kKeys; key += 4)
        for (int i = 0; i < 4; ++i) best[i] = max(best[i], load(line + (key + i) * kRows));
      const vec old = load(peak);
      const vec found = mul(max(max(best[0], best[1]), max(best[2], best[3])), splat(scale_));
      const uint32_t risen = above(found, add(old, splat(kSlack)));
      if (!risen) {
        store(less, splat(1.0f));
        continue;
      }
      store(peak, select(risen, found, old));
      store(less, select(risen, power_of_two(sub(old, found)), splat(1.0f)));
      shrinks |= (risen & above(old, splat(-std::numeric_limits<float>::infinity()))) != 0;
    }
  }

  // 16 keys' scores to weights.
  void raise(int64_t chunk, int g, int block) {
    const float* line = scores(chunk, g) + block * kSquare;
    const float* peak = peaks(sums_ + g * state());
    bf16* out = weights(chunk, g) + block * kSquare;
    vec less[kParts];
    for (int p = 0; p < kParts; ++p) {
      // A row that has seen nothing has no peak.
      const vec known = load(peak + p * kLanes), none = splat(-std::numeric_limits<float>::max());
      less[p] = select(above(none, known), zero(), sub(zero(), known));
    }
    for (int key = 0; key < kRows; key += 2, line += 2 * kRows, out += kWidth) {
      vec a[kParts], b[kParts];
      for (int p = 0; p < kParts; ++p) {
        a[p] = power_of_two(fma(load(line + p * kLanes), splat(scale_), less[p]));
        b[p] = power_of_two(fma(load(line + kRows + p * kLanes), splat(scale_), less[p]));
      }
      store_pairs(out, a, b);
    }
  }

  // Two blocks of keys meet 32 dimensions of 32 rows.
  void score_step(int64_t chunk, int64_t index) {
    const int64_t half = index / steps_, s = index % steps_;
    if (s == 0) tiles::zero_sums();
    multiply(layout_->keys(chunk, 2 * half, s), layout_->keys(chunk, 2 * half + 1, s),
             q_ + s * kTile, q_ + (steps_ + s) * kTile);
    if (s + 1 < steps_) return;
    for_squares(scores(chunk, 0) + 2 * half * kSquare, scores(chunk, 1) + 2 * half * kSquare,
                [](auto t, float* c) { tiles::store<decltype(t)::value>(c, tiles::kLine); });
  }

  int64_t gather_steps() const { return (lines_ / 2 + 1) * kHalves; }

  void gather_begin(int64_t chunk) {
    for (int g = 0; g < kSide; ++g) {
      if (fresh_ || !shrinks_[chunk % 2][g]) continue;
      float* sums = sums_ + g * state();
      for (int p = 0; p < kParts; ++p) {
        const vec less = load(shrink(chunk, g) + p * kLanes);
        for (int64_t i = p * kLanes; i < (lines_ + 1) * kSquare; i += kRows)
          store(sums + i, mul(load(sums + i), less));
      }
    }
  }

  // 32 dimensions of 32 rows meet 32 keys. Behind the dimensions comes a line of ones, whose sums
  // are the totals.
  void gather_step(int64_t chunk, int64_t index) {
    const int64_t line = index / kHalves * 2, half = index % kHalves;
    float *low = sums_ + line * kSquare, *high = sums_ + state() + line * kSquare;
    const bool one = line == lines_;
    if (half == 0 && fresh_) tiles::zero_sums();
    if (half == 0 && !fresh_) {
      const auto load = [](auto t, float* c) {
        tiles::load<decltype(t)::value>(c, tiles::kLine);
      };
      one ? for_pair(low, high, load) : for_squares(low, high, load);
    }
    const bf16 *a = weights(chunk, 0) + half * kTile, *b = weights(chunk, 1) + half * kTile;
    if (one)
      multiply(ones_, a, b);
    else
      multiply(layout_->values(chunk, line, half),
               line + 1 < lines_ ? layout_->values(chunk, line + 1, half) : ones_, a, b);
    if (half + 1 < kHalves) return;
    const auto store = [](auto t, float* c) {
      tiles::store<decltype(t)::value>(c, tiles::kLine);
    };
    one ? for_pair(low, high, store) : for_squares(low, high, store);
    if (line + 2 > lines_) fresh_ = false;
  }

  // C: tiles 0 and 1 are the first lines of both groups, 2 and 3 the lines behind.
  template <typename Body>
  static void for_pair(float* low, float* high, const Body& body) {
    body(std::integral_constant<int, 0>(), low);
    body(std::integral_constant<int, 1>(), high);
  }
  template <typename Body>
  static void for_squares(float* low, float* high, const Body& body) {
    for_pair(low, high, body);
    body(std::integral_constant<int, 2>(), low + kSquare);
    body(std::integral_constant<int, 3>(), high + kSquare);
  }

  static void multiply(const bf16* line, const bf16* low, const bf16* high) {
    tiles::load<4>(line, tiles::kLine);
    tiles::load<6>(low, tiles::kLine);
    tiles::multiply<0, 4, 6>();
    tiles::load<7>(high, tiles::kLine);
    tiles::multiply<1, 4, 7>();
  }
  static void multiply(const bf16* line, const bf16* next, const bf16* low, const bf16* high) {
    multiply(line, low, high);
    tiles::load<5>(next, tiles::kLine);
    tiles::multiply<2, 5, 6>();
    tiles::multiply<3, 5, 7>();
  }

  // Of totals, which are numbers from 2^-kSlack on, zeros or NaNs.
  static uint32_t not_zero(vec v) { return ~above(splat(1e-9f), v) & ((1u << kLanes) - 1); }

  // As `c2c::merge`, for each lane.
  void merge(int64_t at) {
    for (int g = 0; g < kSide; ++g) {
      float *into = gathered_ + (at / kRows + g) * state(), *from = sums_ + g * state();
      for (int p = 0; p < kParts; ++p, into += kLanes, from += kLanes) {
        const vec peak = mul(load(peaks(from)), splat(kLn2));
        const uint32_t has = not_zero(load(totals(into)));
        const uint32_t more = not_zero(load(totals(from)));
        const vec old = load(peaks(into)), best = max(old, peak);
        store(peaks(into), select(has & more, best, select(more, peak, old)));
        const auto each = [&](const auto& body) {
          for (int64_t i = 0; i < (lines_ + 1) * kSquare; i += kRows)
            store(into + i, body(load(into + i), load(from + i)));
        };
        if (!(has & more)) {  // no arithmetic with what nobody has written yet: it may be slow
          each([&](vec a, vec b) { return select(more, b, select(has, a, zero())); });
          continue;
        }
        const vec old_share = exp(sub(old, best)), new_share = exp(sub(peak, best));
        each([&](vec a, vec b) {
          const vec both = add(mul(a, old_share), mul(b, new_share));
          return select(has & more, both, select(more, b, a));
        });
      }
    }
  }

  void end(const AttentionArgs& a) const {
    alignas(64) float lines[kSquare];
    for (int64_t at = 0; at < rows_.count(); at += kRows) {
      float* sums = gathered_ + at / kRows * state();
      for (int64_t t = 0; t < lines_; ++t) {
        for (int i = 0; i < kSquare; i += kLanes)
          store(lines + i, div(load(sums + t * kSquare + i), load(totals(sums) + i % kRows)));
        rows_.write(a, at, lines, t * kRows, std::min<int64_t>(kRows, dim_ - t * kRows));
      }
    }
  }

  int64_t dim_ = 0, steps_ = 0, lines_ = 0;  // of 32 and of 16 dimensions
  float scale_ = 0.0f;
  const Layout* layout_ = nullptr;
  PromptRows rows_;
  Scratch state_room_;
  float* gathered_ = nullptr;  // states of all rows: of the splits so far
  float* sums_ = nullptr;      // states of the rows that walk: of this split
  const bf16* q_ = nullptr;
  bool fresh_ = false;  // nothing has been gathered yet
  bool shrinks_[2][kSide] = {};
  alignas(64) float scores_[2 * kSide * kScores];
  alignas(64) bf16 weights_[2 * kSide * kHalves * kTile];
  alignas(64) float shrink_[2 * kSide * kRows];
  alignas(64) bf16 ones_[kTile];
};

}  // namespace c2c::chunks
