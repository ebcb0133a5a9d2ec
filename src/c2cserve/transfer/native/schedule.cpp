#include "schedule.h"

#include <algorithm>
#include <cmath>

namespace c2c::transfer {
namespace {

constexpr int kPauseDoublings = 6;    // the longest pause after stalls is 64 times the first
constexpr uint64_t kPage = 4096;      // larger micro-tasks are cut at multiples of it
constexpr int kOutstandingShare = 2;  // a link has half of its part of the queue outstanding

}  // namespace

Schedule::Schedule(int ports, const std::vector<std::pair<int, int>>& relays,
                   const Settings& settings, const Remotes& remotes)
    : settings_(settings), remotes_(remotes), queues_(ports), links_(ports) {
  for (int i = 0; i < ports; ++i) {
    queues_[i].carriers.push_back(i);
    queues_[i].alone_bytes = settings.alone_bytes;
    links_[i].remote = remotes.is_remote(i);
    links_[i].connected = !links_[i].remote;
    for (int slot = settings.depth - 1; slot >= 0; --slot) {
      links_[i].free_slots[0].push_back(slot);
      links_[i].free_slots[1].push_back(settings.depth + slot);
    }
  }
  for (auto [link, port] : relays) {
    queues_[port].carriers.push_back(link);
    links_[link].foreign.push_back(port);
  }
}

// ---- transfers ----------------------------------------------------------------------------------

void Schedule::add(const TransferPtr& transfer,
                   std::vector<std::pair<int, std::vector<Piece>>> by_port) {
  for (auto& [port, pieces] : by_port) {
    Job job{transfer, std::move(pieces)};
    for (const Piece& piece : job.pieces) job.bytes += piece.size;
    if (job.bytes == 0) continue;
    queues_[port].bytes[transfer->urgency] += job.bytes;
    queues_[port].jobs[transfer->urgency].push_back(std::move(job));
    ++transfer->waiting;
  }
  end_if_over(transfer);
}

void Schedule::cancel(const TransferPtr& transfer) {
  if (transfer->state == State::kMoving) stop(transfer, State::kCancelled);
}

void Schedule::stop(const TransferPtr& transfer, State state) {
  transfer->state = state;
  if (transfer->waiting > 0) {
    for (Queue& queue : queues_) {
      auto& jobs = queue.jobs[transfer->urgency];
      for (auto job = jobs.begin(); job != jobs.end();) {
        if (job->transfer != transfer) {
          ++job;
          continue;
        }
        queue.bytes[transfer->urgency] -= job->bytes;
        job = jobs.erase(job);
      }
    }
  }
  transfer->waiting = 0;
  end_if_over(transfer);
}

void Schedule::end_if_over(const TransferPtr& transfer) {
  if (!transfer->over()) return;
  if (transfer->state == State::kMoving) transfer->state = State::kDone;
  over_.push_back(transfer);
}

std::vector<TransferPtr> Schedule::take_over() { return std::exchange(over_, {}); }

// ---- links --------------------------------------------------------------------------------------

bool Schedule::has_own(int link) const {
  const auto& jobs = queues_[link].jobs;
  return std::any_of(jobs, jobs + kClasses, [](const auto& one) { return !one.empty(); });
}

bool Schedule::waiting() const {
  for (int i = 0; i < int(queues_.size()); ++i)
    if (has_own(i)) return true;
  return false;
}

Task* Schedule::pull(int number, double now_s) {
  Link& link = links_[number];
  if (link.carried() >= settings_.depth) return nullptr;
  int urgency = 0;
  const int port = choose(link, number, now_s, &urgency);
  if (port < 0) return nullptr;
  auto task = std::make_unique<Task>();
  task->link = number, task->port = port;
  task->relayed = port != number, task->urgency = urgency;
  auto& free_slots = link.free_slots[task->relayed];
  task->slot = free_slots.back();
  free_slots.pop_back();
  task->since_s = now_s, task->late_s = now_s + settings_.stall_s;
  take(queues_[port], urgency, *task);
  ++outstanding_;
  link.outstanding.push_back(std::move(task));
  return link.outstanding.back().get();
}

// Returns how many links carry a queue, those that pause too.
int Schedule::carriers(const Queue& queue) const {
  const int own = queue.carriers.front();
  return int(std::count_if(queue.carriers.begin(), queue.carriers.end(), [&](int at) {
    return at == own || (links_[at].connected && links_[at].relays_from_s < kNever);
  }));
}

uint64_t Schedule::task_bytes(const Queue& queue, int urgency) const {
  const uint64_t carriers = this->carriers(queue);
  if (carriers == 1) return queue.alone_bytes;
  uint64_t share = queue.bytes[urgency] / (kOutstandingShare * settings_.depth * carriers);
  if (share > kPage) share -= share % kPage;
  return std::clamp<uint64_t>(share, settings_.task_bytes, settings_.task_bytes_most);
}

// Moves the first bytes of a queue into a micro-task: those of one transfer, at most.
void Schedule::take(Queue& queue, int urgency, Task& task) {
  Job& job = queue.jobs[urgency].front();
  const uint64_t most = std::min(task_bytes(queue, urgency), job.bytes);
  const size_t pieces_most =
      task.relayed ? settings_.relay_pieces_most : settings_.direct_pieces_most;
  task.transfer = job.transfer;
  task.size = 0;
  while (task.size < most && task.pieces.size() < pieces_most) {
    Piece& piece = job.pieces[job.at];
    if (task.size > 0 && links_[task.link].remote && !remotes_.reaches(task.link, piece)) break;
    const uint64_t size = std::min(piece.size, most - task.size);
    if (size > 0) task.pieces.push_back({piece.target, piece.source, size});
    piece = {piece.target + size, piece.source + size, piece.size - size};
    job.at += piece.size == 0;
    task.size += size;
  }
  job.bytes -= task.size;
  queue.bytes[urgency] -= task.size;
  ++task.transfer->carried;
  if (job.bytes == 0) {
    --task.transfer->waiting;
    queue.jobs[urgency].pop_front();
  }
}

// Returns the queue that a link takes from, -1 for none.
int Schedule::choose(const Link& link, int own, double now_s, int* urgency) const {
  // While one of its relays is stuck, a link relays no more.
  const bool relays = link.connected && link.recalled == 0 && now_s >= link.relays_from_s &&
                      now_s >= link.rests_until_s && (!link.remote || remotes_.takes(own));
  if (!settings_.longest_first) {  // what is its own comes before relays of any class
    for (*urgency = 0; *urgency < kBackground; ++*urgency)
      if (!queues_[own].jobs[*urgency].empty()) return own;
  }
  for (*urgency = 0; *urgency < kBackground; ++*urgency)
    if (const int found = pick(link, own, relays, *urgency); found >= 0) return found;
  if (link.carried() > 0 || now_s < link.background_from_s) return -1;
  return pick(link, own, relays, kBackground);
}

int Schedule::pick(const Link& link, int own, bool relays, int urgency) const {
  int best = -1;
  uint64_t most = 0;
  if (!queues_[own].jobs[urgency].empty()) {
    if (!settings_.longest_first) return own;
    best = own, most = queues_[own].bytes[urgency];
  }
  if (!relays) return best;
  for (const int port : link.foreign)
    if (queues_[port].bytes[urgency] > most && reaches(own, port, urgency))
      best = port, most = queues_[port].bytes[urgency];
  return best;
}

bool Schedule::reaches(int link, int port, int urgency) const {
  if (!links_[link].remote) return true;
  const Job& job = queues_[port].jobs[urgency].front();
  return remotes_.reaches(link, job.pieces[job.at]);
}

void Schedule::arrived(Task* task, double now_s) {
  if (task->recalled) {
    // It may have ended because it was recalled. To send it again is always right.
    give_up(task);
    release(task);
    return;
  }
  Link& link = links_[task->link];
  ++link.counts.tasks;
  if (task->relayed) {
    link.counts.relayed_bytes += task->size;
    link.stalls_in_row = 0;
  } else {
    link.counts.direct_bytes += task->size;
  }
  if (task->urgency == kBackground) {  // those are alone on their link, as far as is known
    const double took_s = now_s - task->since_s, s_per_byte = took_s / task->size;
    if (s_per_byte > settings_.slow * link.fastest_s_per_byte)
      link.background_from_s = now_s + took_s;
    link.fastest_s_per_byte = std::min(link.fastest_s_per_byte, s_per_byte);
  }
  const TransferPtr transfer = task->transfer;
  transfer->moved += task->size;
  release(task);
  --transfer->carried;
  end_if_over(transfer);
}

void Schedule::release(Task* task) {
  Link& link = links_[task->link];
  link.recalled -= task->recalled;
  link.free_slots[task->relayed].push_back(task->slot);
  --outstanding_;
  const auto is_it = [task](const std::unique_ptr<Task>& one) { return one.get() == task; };
  link.outstanding.erase(std::find_if(link.outstanding.begin(), link.outstanding.end(), is_it));
}

double Schedule::due(double now_s) const {
  double at_s = kNever;
  for (const Link& link : links_)
    for (const auto& task : link.outstanding)
      if (task->relayed && !task->recalled) at_s = std::min(at_s, task->late_s);
  if (waiting())
    for (int i = 0; i < int(links_.size()); ++i)
      if (now_s < links_[i].rests_until_s && !has_better(i))
        at_s = std::min(at_s, links_[i].rests_until_s);
  const auto has_background = [](const Queue& queue) { return !queue.jobs[kBackground].empty(); };
  if (std::none_of(queues_.begin(), queues_.end(), has_background)) return at_s;
  for (const Link& link : links_)
    if (now_s < link.background_from_s) at_s = std::min(at_s, link.background_from_s);
  return at_s;
}

// Whether a link should not relay now: it has bytes of its own, or its process has.
bool Schedule::has_better(int number) const {
  const Link& link = links_[number];
  if (link.remote) return link.connected && !remotes_.takes(number);
  const auto& jobs = queues_[number].jobs;
  const auto is_own = [](const auto& task) {
    return !task->relayed && task->urgency != kBackground;
  };
  return std::any_of(jobs, jobs + kBackground, [](const auto& one) { return !one.empty(); }) ||
         std::any_of(link.outstanding.begin(), link.outstanding.end(), is_own);
}

std::vector<Task*> Schedule::yielding(double now_s) {
  std::vector<Task*> found;
  if (settings_.longest_first) return found;
  for (int i = 0; i < int(links_.size()); ++i) {
    if (links_[i].foreign.empty() || !has_better(i)) continue;
    links_[i].rests_until_s = now_s + settings_.rest_s;
    for (auto& task : links_[i].outstanding) {
      if (!task->relayed || task->recalled) continue;
      recall(task.get());
      found.push_back(task.get());
    }
  }
  return found;
}

// ---- faults -------------------------------------------------------------------------------------

void Schedule::failed(Task* task, const std::string& fault) {
  Link& link = links_[task->link];
  ++link.counts.errors;
  if (task->relayed) {
    link.relays_from_s = kNever;
    give_up(task);
    release(task);
    return;
  }
  const TransferPtr transfer = task->transfer;
  release(task);
  --transfer->carried;
  if (transfer->fault.empty()) transfer->fault = fault;
  stop(transfer, State::kFailed);
}

std::vector<Task*> Schedule::stalled(double now_s) {
  std::vector<Task*> found;
  for (Link& link : links_) {
    for (auto& task : link.outstanding) {
      if (!task->relayed || task->recalled || now_s < task->late_s) continue;
      recall(task.get());
      found.push_back(task.get());
      ++link.counts.stalls;
      if (now_s < link.relays_from_s) continue;  // the first of those that stall together counts
      const int doublings = std::min(link.stalls_in_row++, kPauseDoublings);
      link.relays_from_s = now_s + std::ldexp(settings_.pause_s, doublings);
    }
  }
  return found;
}

void Schedule::recall(Task* task) {
  task->recalled = true;
  ++links_[task->link].recalled;
}

void Schedule::connect(int link, double now_s) {
  links_[link].connected = true;
  links_[link].relays_from_s = now_s;
  links_[link].stalls_in_row = 0;
}

void Schedule::disconnect(int link) { links_[link].connected = false; }

void Schedule::give_up(Task* task) {
  if (task->given_up) return;
  task->given_up = true;
  const TransferPtr transfer = task->transfer;
  --transfer->carried;
  if (transfer->state != State::kMoving) {
    end_if_over(transfer);
    return;
  }
  queues_[task->port].bytes[task->urgency] += task->size;
  queues_[task->port].jobs[task->urgency].push_front({transfer, task->pieces, 0, task->size});
  ++transfer->waiting;
  ++links_[task->link].counts.resent;
}

}  // namespace c2c::transfer
