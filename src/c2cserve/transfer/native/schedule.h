// Which link carries which micro-task, and when: the scheduler of the transfer engine.
//
//     submitted -> queue of its port -> pulled by a link -> outstanding -> arrived
//                    ^                    direct: the port's own    |
//                    |                    relay: another GPU's      | error or stall of a relay
//                    +----------------------------------------------+
//
// Each port has a queue of bytes, and is itself a link that carries them. A link pulls a micro-task
// when it has fewer outstanding than its depth, so a congested link pulls less. It takes what is in
// its own queue first: that path is direct. Else it relays for another GPU. Micro-tasks are cut
// when they are pulled: large ones while much is left, small ones at the end, so that links end
// together.
//
// Nothing here waits, copies or reads a clock. Method (MMA, 3.4): queues for each destination,
// outstanding queues of fixed depth for each link, direct path first, longest queue first.
#pragma once
#include <stdint.h>

#include <atomic>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace c2c::transfer {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Classes of urgency (`transfer.settings.Urgency`). A link takes the most urgent that it may carry.
// The last class is the background: it takes what others leave of a link, a micro-task at a time.
constexpr int kClasses = 4, kBackground = kClasses - 1;

struct Piece {  // contiguous bytes to copy; addresses are those that GPUs use
  uint64_t target, source, size;
};

struct Settings {  // `transfer.settings.Settings`; times are in seconds
  int64_t task_bytes, task_bytes_most, alone_bytes, peer_bytes, one_path_bytes;
  int64_t batch_bytes, kernel_in_bytes, kernel_out_bytes, border_bytes;
  int32_t depth, longest_first;
  int32_t direct_pieces_most, relay_pieces_most;
  double stall_s, pause_s, slow, poll_s, spin_s, rest_s;
};

enum class State : int32_t { kMoving, kDone, kCancelled, kFailed };

struct Transfer {
  int urgency = 0;
  State state = State::kMoving;
  std::string fault;
  int waiting = 0;  // jobs in queues
  int carried = 0;  // micro-tasks outstanding, without those that write nothing more
  std::atomic<int64_t> moved{0};  // bytes that have arrived

  bool over() const { return waiting == 0 && carried == 0; }
};
using TransferPtr = std::shared_ptr<Transfer>;

struct Job {  // what is left in a queue of one transfer
  TransferPtr transfer;
  std::vector<Piece> pieces;
  size_t at = 0;  // the first piece that is left; its first bytes may be gone
  uint64_t bytes = 0;
};

struct Task {  // a micro-task on a link; it keeps one of the link's slots until it is released
  int link, port, slot;  // slots below the depth are for direct paths, the others for relays
  int urgency;
  bool relayed;
  std::vector<Piece> pieces;
  uint64_t size;
  double since_s, late_s;
  TransferPtr transfer;
  bool recalled = false;  // the link was asked to write nothing more of it
  bool given_up = false;  // it was sent again: what may be left of it writes nothing
};

struct LinkCounts {
  int64_t direct_bytes, relayed_bytes, tasks, resent, stalls, errors;
};

struct Queue {
  std::vector<int> carriers;
  std::deque<Job> jobs[kClasses];
  uint64_t bytes[kClasses] = {};
  uint64_t alone_bytes = 0;  // of a micro-task, if no other link carries the queue
};

struct Link {
  std::vector<int> foreign;       // queues that it can relay for
  std::vector<int> free_slots[2];  // for direct paths, for relays: a stuck relay takes no other
  std::vector<std::unique_ptr<Task>> outstanding;
  int recalled = 0;  // of them; those are not counted as what the link carries
  bool remote = false, connected = true;
  double relays_from_s = -kNever;  // it does not relay before; infinity: never again
  double background_from_s = -kNever;
  double rests_until_s = -kNever;  // after what is its own; it relays no earlier
  double fastest_s_per_byte = kNever;
  int stalls_in_row = 0;
  LinkCounts counts{};

  int carried() const { return int(outstanding.size()) - recalled; }
};

// Links that other processes have: they come and go, and reach a part of the memory only.
class Remotes {
 public:
  virtual ~Remotes() = default;
  virtual bool is_remote(int) const { return false; }
  virtual bool takes(int) const { return true; }  // its process has nothing better for it
  virtual bool reaches(int, const Piece&) const { return true; }
};

class Schedule {
 public:
  // `relays` are (link, port that it can relay for). Remote links carry nothing until `connect`.
  Schedule(int ports, const std::vector<std::pair<int, int>>& relays, const Settings& settings,
           const Remotes& remotes);

  // The link may relay from now on, whatever was before.
  void connect(int link, double now_s);
  void disconnect(int link);

  // Sets the size of the port's micro-tasks while no other link carries its queue.
  void set_alone(int port, uint64_t bytes) { queues_[port].alone_bytes = bytes; }

  void add(const TransferPtr& transfer, std::vector<std::pair<int, std::vector<Piece>>> by_port);
  // Drops what is queued. The transfer is over when what is outstanding is over.
  void cancel(const TransferPtr& transfer);

  // Returns the micro-task that a link carries next, null if it has to wait.
  Task* pull(int link, double now_s);
  // Whether a link's own queue has anything. Such links pull before others do.
  bool has_own(int link) const;
  bool waiting() const;
  void arrived(Task* task, double now_s);
  // Counts bytes that a link has carried outside of its queue.
  void count_direct(int link, uint64_t bytes) { links_[link].counts.direct_bytes += bytes; }
  void failed(Task* task, const std::string& fault);
  // Sends again what a relay carried, first of its queue. Its slot stays taken until `release`.
  void give_up(Task* task);
  // Returns the relays to recall now. Their links relay no more for a while.
  std::vector<Task*> stalled(double now_s);
  // Returns the relays to recall now, since their links have something of their own. To be called
  // before links pull.
  std::vector<Task*> yielding(double now_s);
  // Notes that a relay is recalled.
  void recall(Task* task);
  // When a relay is late, or a link that pauses or rests may carry what waits; infinity if there is
  // no such time.
  double due(double now_s) const;

  const std::vector<Link>& links() const { return links_; }
  int outstanding() const { return outstanding_; }
  std::vector<TransferPtr> take_over();  // transfers that have ended since

 private:
  bool has_better(int link) const;
  int choose(const Link& link, int own, double now_s, int* urgency) const;
  int pick(const Link& link, int own, bool relays, int urgency) const;
  bool reaches(int link, int port, int urgency) const;  // the first bytes of a queue
  int carriers(const Queue& queue) const;
  void take(Queue& queue, int urgency, Task& task);
  uint64_t task_bytes(const Queue& queue, int urgency) const;
  void release(Task* task);
  void stop(const TransferPtr& transfer, State state);
  void end_if_over(const TransferPtr& transfer);

  Settings settings_;
  const Remotes& remotes_;
  std::vector<Queue> queues_;
  std::vector<Link> links_;
  std::vector<TransferPtr> over_;
  int outstanding_ = 0;
};

}  // namespace c2c::transfer
