// The rows of a prompt's task as lanes of vectors, 16 to a group, and what they read and write.
//
//   many tokens   a group has the 16 tokens of a tile of the next product's x, of one head. So each
//                 line of the tile is written whole, by one thread
//   few           a group has any rows of the task
#pragma once
#include "prompt_layout.h"

namespace c2c::chunks {

constexpr int kPromptRows = 512;  // lanes of a task, at most
constexpr int kSide = 2;          // groups that walk along the keys together
constexpr int kWalk = kSide * kRows;

class PromptRows {
 public:
  // Lanes behind the last row repeat one: nothing is written of them.
  void begin(const AttentionArgs& a, const Task& task) {
    dim_ = a.kv.head_dim;
    steps_ = (dim_ + kWidth - 1) / kWidth;
    count_ = 0;
    if (task.by_tiles)
      take_tiles(a, task);
    else
      take_rows(a, task);
    if (count_ % kWalk) {
      for (int l = 0; l < kRows; ++l) take(a, task, lanes_[count_ - 1]);
      groups_[count_ / kRows - 1] = {0, 0, false};
    }
    queries_ = reinterpret_cast<bf16*>(room_.room(count_ * steps_ * kWidth / 2));
    for (int64_t at = 0; at < count_; at += kRows) turn_queries(a, at);
  }

  int64_t count() const { return count_; }  // whole walks
  const int32_t* firsts(int64_t at) const { return firsts_ + at; }
  const int32_t* positions(int64_t at) const { return positions_ + at; }
  // [32 dimensions][16 pairs][16 rows][2]
  const bf16* queries(int64_t at) const { return queries_ + at * steps_ * kWidth; }

  // Dimensions [d, d + dims) of a group's rows: [dimension][lane].
  void write(const AttentionArgs& a, int64_t at, const float* lines, int64_t d,
             int64_t dims) const {
    if (a.tiled_out)
      write_tiled(a, at, lines, d, dims);
    else
      write_rows(a, at, lines, d, dims);
  }

 private:
  struct Lane {
    int32_t token, column;  // of q and of the output, where the row's head begins
  };
  // Lanes [from, to) are rows of the task. `tile`: they are those of a tile of x.
  struct Group {
    int from, to;
    bool tile;
  };

  static Lane lane(const AttentionArgs& a, const Task& task, int64_t token, int64_t head) {
    const int64_t group = a.heads / a.kv.kv_heads;
    return {int32_t(token), int32_t((task.head * group + head) * a.kv.head_dim)};
  }

  void take(const AttentionArgs& a, const Task& task, Lane lane) {
    const int64_t position = a.position(task.seq, lane.token);
    lanes_[count_] = lane;
    positions_[count_] = int32_t(position);
    firsts_[count_++] = int32_t(a.first_key(position));
  }

  void take_tiles(const AttentionArgs& a, const Task& task) {
    const int64_t end = task.query + task.count;
    for (int64_t tile = task.query / kRows * kRows; tile < end; tile += kRows)
      for (int64_t head = task.group_from; head < task.group_to; ++head) {
        const int64_t from = std::max(task.query, tile), to = std::min(end, tile + kRows);
        groups_[count_ / kRows] = {int(from - tile), int(to - tile), to - from == kRows};
        for (int64_t l = 0; l < kRows; ++l)
          take(a, task, lane(a, task, std::clamp(tile + l, from, to - 1), head));
      }
  }

  void take_rows(const AttentionArgs& a, const Task& task) {
    const int64_t heads = task.group_to - task.group_from, rows = task.rows();
    for (int64_t at = 0; at < rows; at += kRows) {
      groups_[at / kRows] = {0, int(std::min<int64_t>(kRows, rows - at)), false};
      for (int64_t l = 0; l < kRows; ++l) {
        const int64_t row = std::min(at + l, rows - 1);
        take(a, task, lane(a, task, task.query + row / heads, task.group_from + row % heads));
      }
    }
  }

  void turn_queries(const AttentionArgs& a, int64_t at) {
    alignas(64) bf16 narrowed[kRows * kHeadMax];
    const int64_t width = steps_ * kWidth;
    std::memset(narrowed, 0, size_t(kRows * width) * sizeof(bf16));
    for (int l = 0; l < kRows; ++l) {
      const Lane& lane = lanes_[at + l];
      narrow(narrowed + l * width, a.q + lane.token * a.q_stride + lane.column, dim_);
    }
    auto* out = reinterpret_cast<uint32_t*>(queries_ + at * width);
    for (int64_t s = 0; s < steps_; ++s)
      transpose16(out + s * kTile / 2, kRows,
                  reinterpret_cast<const uint32_t*>(narrowed + s * kWidth), width / 2, kRows,
                  kRows);
  }

  void write_rows(const AttentionArgs& a, int64_t at, const float* lines, int64_t d,
                  int64_t dims) const {
    const Group& group = groups_[at / kRows];
    alignas(64) float turned[kRows * kRows];
    transpose16(turned, kRows, lines, kRows, kRows, kRows);
    for (int l = group.from; l < group.to; ++l) {
      const Lane& lane = lanes_[at + l];
      std::memcpy(a.out + lane.token * a.heads * dim_ + lane.column + d, turned + l * kRows,
                  size_t(dims) * sizeof(float));
    }
  }

  // As tiles of x, whose columns are in pairs: so nothing is turned.
  void write_tiled(const AttentionArgs& a, int64_t at, const float* lines, int64_t d,
                   int64_t dims) const {
    const Group& group = groups_[at / kRows];
    const auto row = [&](int l) {
      return tile_linear::TiledRow(a.tiled_out, a.tokens, a.heads * dim_, lanes_[at + l].token);
    };
    const int64_t column = lanes_[at].column + d;
    for (int64_t i = 0; group.tile && i < dims; i += 2)
      tile_linear::write_columns(row(0).pair(column + i), kRows, 0, lines + i * kRows,
                                 lines + (i + 1) * kRows);
    if (group.tile) return;
    alignas(64) bf16 pairs[kRows * kRows];
    for (int64_t i = 0; i < dims; i += 2)
      tile_linear::write_columns(pairs, kRows, i, lines + i * kRows, lines + (i + 1) * kRows);
    for (int l = group.from; l < group.to; ++l) {
      const auto out = row(l);
      for (int64_t i = 0; i < dims; i += 2)
        std::memcpy(out.pair(lanes_[at + l].column + d + i), pairs + i * kRows + 2 * l,
                    2 * sizeof(bf16));
    }
  }

  int64_t dim_ = 0, steps_ = 0;  // of 32 dimensions
  int64_t count_ = 0;
  Scratch room_;
  bf16* queries_ = nullptr;
  Lane lanes_[kPromptRows];
  Group groups_[kPromptRows / kRows];
  int32_t positions_[kPromptRows], firsts_[kPromptRows];
};

}  // namespace c2c::chunks
