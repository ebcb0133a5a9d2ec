// The transfer engine: a thread that sleeps until there is something to move, and then polls.
//
//     caller    submit: a turn ............... wait: turns for a while, then sleeps
//     thread              | turn | turn | turn | turn: all over |       sleeps
//     links               | task | task | task | task           |
//
// A *turn* queues transfers whose streams have come to them, notes what has arrived, recalls relays
// that are late, and gives every link as much as it may have. The engine's thread does a turn every
// `poll_s` while anything is under way. No function of the driver's has to call back, and no thread
// sleeps for each link. Callers do turns of their own: `submit` one, so that no thread has to wake
// up first, and `wait` many in its first `spin_s`, so that it sees at once how a short transfer
// ends.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "links.h"
#include "relay_channel.h"
#include "schedule.h"

namespace c2c::transfer {

struct Move {  // `transfer.moves.Segment`
  int64_t target, source, size, target_gpu, source_gpu;  // a GPU, or -1 for host memory
};

struct PortName {
  int32_t gpu, direction, source;  // direction: 0 in, 1 out, 2 peer
};

struct Ticket {
  TransferPtr transfer = std::make_shared<Transfer>();
  std::vector<std::pair<int, std::vector<Piece>>> by_port;
  Mark before = nullptr;  // what its stream had
  Mark copied = nullptr;  // the end of a small transfer, which no queue has
  double since_s = 0;
  std::atomic<bool> over{false};  // nothing changes any more
};
using TicketPtr = std::shared_ptr<Ticket>;

struct Closed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Engine {
 public:
  // With `threaded` false no thread is made: tests do turns at times of their own.
  Engine(std::unique_ptr<Links> links, std::vector<PortName> ports,
         const std::vector<std::pair<int, int>>& relays, const Settings& settings, bool threaded);
  ~Engine();

  // Throws `std::invalid_argument` for a move without a path, `Closed`, `Fault`.
  TicketPtr submit(const Move* moves, int64_t count, const Stream* stream, int urgency);
  // Blocks until a transfer is over, or for a time. With `spins`, it does turns for a while first.
  bool wait(const Ticket& ticket, double timeout_s, bool spins);
  void cancel(const TicketPtr& ticket);
  // Lets a stream go on after what is under way of a transfer of which nothing is queued.
  // Throws `std::invalid_argument` if anything is, and `Fault`.
  void follow(const TicketPtr& ticket, const Stream& stream);
  // Cancels everything, and waits for the thread. Returns false if a copy does not end in time.
  bool close(double timeout_s);

  // A link of another process: its server has `channel`, and memory of this process at `far`.
  // Throws `std::invalid_argument` for a link of this process, or one with micro-tasks.
  void connect(int link, Channel* channel);
  // Its process has ended: nothing of it writes any more. What it had is sent again.
  void disconnect(int link);
  void share(int link, uint64_t near, uint64_t far, uint64_t size);
  void unshare(int link, uint64_t near);
  // Writes 1 to a word while anything moves here, 0 else: those for whom this process relays wait
  // for that. It stays until `unwatch`.
  void watch(uint32_t* moving);
  void unwatch(uint32_t* moving);

  void turn(double now_s);      // for tests, at times of their own
  std::string next_incident();  // what has gone wrong since, in words; empty: nothing
  const Schedule& schedule() const { return schedule_; }
  std::mutex& mutex() { return mutex_; }
  Links& links() { return *links_; }

 private:
  int port_of(const Move& move) const;
  TicketPtr sorted(const Move* moves, int64_t count) const;
  void cut(const Move& move, std::vector<Piece>& pieces) const;
  void check_host(const Move* moves, int64_t count);
  std::string name_of(int link) const;
  double clock() const;
  void take_turn(double now_s);
  void admit();
  void collect(double now_s);
  void recall(double now_s);
  void feed(double now_s);
  bool feed_link(int link, double now_s);
  void finish();
  void end(const TicketPtr& ticket);
  void refuse(const TicketPtr& ticket, const std::string& fault);
  void drop_marks(Ticket& ticket);
  void cancel_now(const TicketPtr& ticket);
  void failed(Task* task, const std::string& fault);
  bool idle() const;
  void note(std::string incident);
  void tell_watchers();
  double wakes_at(double now_s) const;
  void wake();
  void work();

  std::unique_ptr<Links> links_;
  std::vector<PortName> ports_;
  Settings settings_;
  Schedule schedule_;
  std::mutex mutex_;
  std::condition_variable wake_, over_;
  std::vector<TicketPtr> gated_;   // their streams have not come to them
  std::vector<TicketPtr> moving_;  // in queues or on links
  std::vector<TicketPtr> copies_;  // small transfers
  std::vector<std::string> incidents_;
  std::vector<uint32_t*> watchers_;
  double progress_s_ = 0;  // when something was last seen to change
  double asleep_until_s_ = 0;
  bool woken_ = false, closing_ = false, ended_ = false;
  std::thread thread_;
};

}  // namespace c2c::transfer
