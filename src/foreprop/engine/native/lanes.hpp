// What stands in front of each connection: `core.sendqueue` and `core.pushwindow`.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "frames.hpp"

namespace foreprop {

// A stable priority queue; in fifo order step and priority are ignored.
template <class Item>
class SendQueue {
  public:
    explicit SendQueue(Order order = Order::priority) : fifo_(order == Order::fifo) {}

    using Urgency = std::tuple<Step, int, std::uint64_t>;

    void push(Step step, int priority, Item item) {
        heap_.push_back({fifo_ ? Urgency{0, 0, sequence} : Urgency{step, priority, sequence},
                         std::move(item)});
        ++sequence;
        std::push_heap(heap_.begin(), heap_.end(), later);
    }
    Item pop() {
        std::pop_heap(heap_.begin(), heap_.end(), later);
        Item item = std::move(heap_.back().item);
        heap_.pop_back();
        return item;
    }
    bool empty() const { return heap_.empty(); }
    std::size_t size() const { return heap_.size(); }
    const Item& head() const { return heap_.front().item; }
    const Urgency& urgency() const { return heap_.front().urgency; }

    template <class Test>
    bool any(Test test) const {
        return std::any_of(heap_.begin(), heap_.end(), [&](const Entry& e) { return test(e.item); });
    }

    std::uint64_t sequence = 0;  // the next item's, among those that are equally urgent

  private:
    struct Entry {
        Urgency urgency;
        Item item;
    };
    static bool later(const Entry& a, const Entry& b) { return a.urgency > b.urgency; }

    bool fifo_;
    std::vector<Entry> heap_;
};

// How peers take turns in order of priority: see `core.sendqueue.Turns`.
struct Turns {
    int first = 0;
    int at_once = 12;
    int at_least = 0;
    bool in_order = false;
};

// A queue for each peer, at most one frame of each under way. `may_leave` is asked about a head,
// and told whether too few are under way; if it refuses, the head stays, and all behind it.
class SendLanes {
  public:
    using MayLeave = std::function<bool(const Frame&, bool)>;

    SendLanes(Order order, Turns turns, MayLeave may_leave = nullptr)
        : order_(order),
          turns_(turns),
          at_once_(order == Order::priority ? turns.at_once : std::numeric_limits<int>::max()),
          at_least_(may_leave ? turns.at_least : 0),
          may_leave_(std::move(may_leave)) {}

    void push(const Frame& frame) {
        auto found = queues_.find(frame.peer);
        if (found == queues_.end()) {
            found = queues_.emplace(frame.peer, SendQueue<Frame>(order_)).first;
            peers_.push_back(frame.peer);
        }
        if (turns_.in_order) found->second.sequence = ++pushed_;
        found->second.push(frame.step, frame.priority, frame);
        ++queued;
    }

    // The heads that may leave now are appended to `out`; they then are under way.
    void depart(Instructions& out) {
        if (static_cast<int>(busy_.size()) >= at_once_) return;
        std::vector<int> waiting;
        for (int peer : peers_)
            if (!queues_.at(peer).empty() && !busy_.contains(peer)) waiting.push_back(peer);
        if (order_ == Order::priority) {
            std::sort(waiting.begin(), waiting.end(),
                      [this](int a, int b) { return turn(a) < turn(b); });
        }
        for (int peer : waiting) depart_to(peer, out);
    }

    void depart_to(int peer, Instructions& out) {
        auto found = queues_.find(peer);
        const int busy = static_cast<int>(busy_.size());
        if (found == queues_.end() || found->second.empty()) return;
        if (busy_.contains(peer) || busy >= at_once_) return;
        if (may_leave_ && !may_leave_(found->second.head(), busy < at_least_)) return;
        busy_.insert(peer);
        --queued;
        out.push_back(sending(found->second.pop()));
    }

    // What was under way to this peer has left: what may follow, to it or instead of it.
    void sent(int peer, Instructions& out) {
        const bool was_full = static_cast<int>(busy_.size()) >= at_once_;
        busy_.erase(peer);
        const bool is_short = static_cast<int>(busy_.size()) < at_least_;
        if (was_full || is_short) {
            depart(out);
        } else {
            depart_to(peer, out);
        }
    }

    // It is gone: what is queued for it leaves no more.
    void forget(int peer) {
        auto found = queues_.find(peer);
        if (found == queues_.end()) return;
        queued -= static_cast<int>(found->second.size());
        queues_.erase(found);
        std::erase(peers_, peer);
    }

    bool idle() const { return busy_.empty() && queued == 0; }
    bool is_idle(int peer) const {
        const auto found = queues_.find(peer);
        return !busy_.contains(peer) && (found == queues_.end() || found->second.empty());
    }
    // For reports.
    bool has(int kind, int slice) const {
        return std::any_of(queues_.begin(), queues_.end(), [&](const auto& each) {
            return each.second.any(
                [&](const Frame& frame) { return frame.kind == kind && frame.slice == slice; });
        });
    }

    int queued = 0;

  private:
    std::tuple<Step, int, std::uint64_t, int> turn(int peer) const {
        const auto& [step, priority, sequence] = queues_.at(peer).urgency();
        const std::uint64_t second = turns_.in_order ? sequence : peer < turns_.first;
        return {step, priority, second, peer};
    }

    Order order_;
    Turns turns_;
    int at_once_;
    int at_least_;
    MayLeave may_leave_;
    std::uint64_t pushed_ = 0;
    std::unordered_map<int, SendQueue<Frame>> queues_;
    std::vector<int> peers_;  // in the order in which they first had a frame
    std::set<int> busy_;
};

// Holds a push back while the server owes the answers to enough that are more urgent.
class PushWindow {
  public:
    PushWindow(std::vector<std::int64_t> sizes_bytes, std::int64_t window_bytes, int servers)
        : sizes_bytes_(std::move(sizes_bytes)),
          window_bytes_(window_bytes / servers),
          least_slices_(std::max(2, std::min(4, servers / 2))) {}

    bool admits(const Frame& push, bool is_short) const {
        const auto found = servers_.find(push.peer);
        if (found == servers_.end() || found->second.bytes < window_bytes_) return true;
        const Urgency own{push.step, push.priority, push.slice};
        const auto& unanswered = found->second.unanswered;  // most urgent first
        const auto end = unanswered.upper_bound(own);
        std::int64_t ahead_bytes = 0;
        int ahead = 0;
        for (auto each = unanswered.begin(); each != end; ++each, ++ahead)
            ahead_bytes += sizes_bytes_[std::get<2>(*each)];
        if (ahead < least_slices_ || ahead_bytes < window_bytes_) return true;
        const auto& [step, priority, _] = *unanswered.begin();
        return is_short && std::pair{step, priority} != std::pair{push.step, push.priority};
    }

    void left(const Frame& push) {
        close(push.slice);  // it leaves once more, for its server has changed
        const Urgency urgency{push.step, push.priority, push.slice};
        open_[push.slice] = {push.peer, urgency};
        Owed& owed = servers_[push.peer];
        owed.unanswered.insert(urgency);
        owed.bytes += sizes_bytes_[push.slice];
    }

    // Of no consequence if the slice's push has carried nothing.
    void answered(int slice) { close(slice); }

    void forget(int server) {
        for (const auto& urgency : servers_[server].unanswered)
            open_.erase(std::get<2>(urgency));
        servers_.erase(server);
    }

  private:
    using Urgency = std::tuple<Step, int, int>;  // every worker agrees on it
    struct Owed {
        std::multiset<Urgency> unanswered;
        std::int64_t bytes = 0;
    };

    void close(int slice) {
        const auto found = open_.find(slice);
        if (found == open_.end()) return;
        const auto& [server, urgency] = found->second;
        Owed& owed = servers_[server];
        owed.unanswered.erase(owed.unanswered.find(urgency));
        owed.bytes -= sizes_bytes_[slice];
        open_.erase(found);
    }

    std::vector<std::int64_t> sizes_bytes_;
    std::int64_t window_bytes_;
    int least_slices_;
    std::map<int, Owed> servers_;
    std::unordered_map<int, std::pair<int, Urgency>> open_;  // by slice: server and urgency
};

// `core.sendqueue.SendBound`: what the kernel may hold of a connection that is not acknowledged.
class SendBound {
  public:
    explicit SendBound(int most_bytes)
        : bytes_(most_bytes), least_bytes_(most_bytes / 4), most_bytes_(most_bytes) {}
    int bytes() const { return bytes_; }
    bool observe(std::uint32_t round_trip_us, std::uint32_t shortest_us) {
        const int before = bytes_;
        shortest_us_ = std::min(shortest_us_, static_cast<double>(shortest_us));
        if (round_trip_us > 3.0 * shortest_us_) {
            bytes_ = std::max(least_bytes_, before / 2);
        } else if (round_trip_us < 1.5 * shortest_us_) {
            bytes_ = static_cast<int>(std::min<std::int64_t>(most_bytes_, std::int64_t{before} * 2));
        }
        return bytes_ != before;
    }

  private:
    int bytes_, least_bytes_, most_bytes_;
    double shortest_us_ = std::numeric_limits<double>::infinity();
};

}  // namespace foreprop
