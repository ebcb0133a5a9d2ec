// Links that are functions of a test, which copies the bytes in whatever time and order it likes.
#pragma once
#include "links.h"

namespace c2c::transfer {

struct TaskView {  // of a `Task`, for other languages
  int32_t link, port, slot, relayed, recalled, given_up;
  int64_t size, pieces;
  const Piece* piece;
};

inline TaskView view_of(const Task& task) {
  return {task.link,          task.port,      task.slot,
          task.relayed,       task.recalled,  task.given_up,
          int64_t(task.size), int64_t(task.pieces.size()), task.pieces.data()};
}

struct LinkFunctions {  // they return 1 for true, 0 for false, and -1 for an error of the link
  int (*start)(const TaskView*);
  int (*is_over)(const TaskView*);
  int (*recall)(const TaskView*);
  int (*is_harmless)(const TaskView*);
  int (*is_passed)(void* mark);  // marks are the streams' handles
  int (*copy)(int port, int64_t pieces, const Piece* piece);
};

class CalledLinks : public Links {
 public:
  explicit CalledLinks(const LinkFunctions& functions) : functions_(functions) {}

  void start(const Task& task) override { call(functions_.start, task); }
  bool is_over(const Task& task) override { return call(functions_.is_over, task); }
  void recall(const Task& task) override { call(functions_.recall, task); }
  bool is_harmless(const Task& task) override { return call(functions_.is_harmless, task); }
  void check_host(uint64_t) override {}
  Mark mark(const Stream& stream) override { return stream.handle; }
  bool is_passed(Mark mark) override { return checked(functions_.is_passed(mark)); }
  void drop(Mark) noexcept override {}
  void follow(const Stream&, const Task&) override {}
  void follow(const Stream&, Mark) override {}
  Mark copy(int port, const std::vector<Piece>& pieces, const Stream* after) override {
    checked(functions_.copy(port, int64_t(pieces.size()), pieces.data()));
    return after == nullptr ? this : after->handle;
  }

 private:
  static bool call(int (*function)(const TaskView*), const Task& task) {
    const TaskView view = view_of(task);
    return checked(function(&view));
  }
  static bool checked(int result) {
    if (result < 0) throw Fault("broken");
    return result > 0;
  }

  LinkFunctions functions_;
};

}  // namespace c2c::transfer
