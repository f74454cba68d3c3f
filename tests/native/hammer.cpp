// Planes of one process over socket pairs, for sanitizers: they train while other threads read,
// write, ask, join and leave. `hammer STEPS`; test_sanitized.py compiles and runs it.
#include <sys/mman.h>

#include "planes.hpp"

using namespace testing;

namespace {

// What survivors of a rank that is lost say to each other, as Python does (`core.takeover`).
class Survivors {
  public:
    explicit Survivors(int lost) : lost_(lost) {}
    int lost() const { return lost_; }
    int owner_of(int slice) const { return slice % lost_; }
    // Blocks until all have claimed; returns after which rounds slices go on, the first time only
    // once `settle` has told their owners.
    template <class Settle>
    std::map<int, Round> claim(const std::map<int, Round>& claims, int rank, Settle settle) {
        std::unique_lock lock(mutex_);
        for (const auto& [slice, round] : claims) by_slice_[slice][rank] = round;
        if (++said_ == lost_) {
            for (const auto& [slice, by] : by_slice_) {
                Round newest = never;
                for (const auto& [_, round] : by) newest = std::max(newest, round);
                settled_[slice] = newest;
            }
            settle(settled_, by_slice_);
            is_settled_ = true;
            changed_.notify_all();
        }
        changed_.wait(lock, [&] { return is_settled_; });
        return settled_;
    }

  private:
    const int lost_;
    std::mutex mutex_;
    std::condition_variable changed_;
    int said_ = 0;
    bool is_settled_ = false;
    std::map<int, std::map<int, Round>> by_slice_;
    std::map<int, Round> settled_;
};

// One rank as Python has it: threads that read each connection, one that trains, others that ask.
class Rank {
  public:
    Rank(int rank, int ranks, Reply reply = Reply::broadcast, Survivors* survivors = nullptr)
        : setting_(setting_for(rank, ranks, reply, survivors != nullptr)), survivors_(survivors), plane_(std::make_unique<Plane>(setting_)) {
        for (int& link : links_) {
            link = memfd_create("link", MFD_CLOEXEC);
            require(!ftruncate(link, sizeof(double)), "a link's file has its length");
        }
    }
    ~Rank() {
        for (int link : links_) ::close(link);
    }

    Plane& plane() { return *plane_; }
    const PlaneSetting& setting() const { return setting_; }

    Plane::Id adopt(Role role, int peer, int fd) {
        const Plane::Id id = plane_->adopt(role, role == Plane::worker ? -1 : setting_.rank, fd);
        if (role == Plane::worker) plane_->bound(id, peer % 2, peer % 2 ? 0 : 400'000);
        if (setting_.workers > 2) plane_->pace(id, links_[0], links_[1], 1e-9);
        plane_->carry(id, peer);
        ids_.push_back(id);
        threads_.emplace_back([this, id, role, peer] {
            read(id);
            const bool outlives =
                survivors_ && !ends_ && peer == survivors_->lost() && setting_.rank != peer;
            if (outlives) outlive(id, role);
            if (!outlives) lose();
        });
        return id;
    }
    void start(int steps) {
        threads_.emplace_back([this] { ask(); });
        threads_.emplace_back([this] { write(); });
        threads_.emplace_back([this] { join_and_leave(); });
        training_ = std::thread([this, steps] { train(steps); });
    }
    void wait() { training_.join(); }
    // As Python does: streams close, which ends who is in a call, and then the plane.
    void close() {
        ends_ = true;
        plane_->ring();
        for (Plane::Id id : ids_) plane_->release(id);
        for (auto& each : threads_) each.join();
        threads_.clear();
        plane_.reset();
    }
    // All connections break, as if the process had died, for some a little later.
    void vanish(const std::vector<int>& fds, int pause_us = 0) {
        for (int fd : fds) {
            shutdown(fd, SHUT_RDWR);
            std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
        }
    }
    bool is_lost() const { return lost_; }
    std::vector<Rank*> others;  // that survive, this one among them
    int steps() const { return steps_; }
    long passed() const { return passed_; }
    long norms() const { return norms_; }

  private:
    static PlaneSetting setting_for(int rank, int ranks, Reply reply, bool elastic) {
        PlaneSetting made = setting_of(rank, ranks, reply, elastic ? Codec::none : Codec::bf16);
        made.elastic = elastic;
        return made;
    }
    void lose() {
        lost_ = true;
        plane_->ring();
    }
    // The last rank is gone, at this one's server, or with its own server.
    void outlive(Plane::Id id, Role role) {
        const int own = setting_.rank, gone = survivors_->lost();
        plane_->release(id);
        if (role == Plane::server) {
            plane_->drop(own, gone);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));  // as others are told
            plane_->go_on(own);
            return;
        }
        std::vector<std::pair<int, int>> owners;
        for (std::size_t slice = 0; slice < setting_.slices.size(); ++slice)
            if (setting_.slices[slice].server == gone)
                owners.emplace_back(slice, survivors_->owner_of(static_cast<int>(slice)));
        plane_->slices_lost(gone, owners);
        std::map<int, Round> claims;
        for (const auto& [slice, _] : owners) claims[slice] = plane_->slice(slice).claim;
        const auto rounds = survivors_->claim(claims, own, [&](const auto& settled, const auto& by) {
            for (const auto& [slice, after] : settled) settle(slice, after, by.at(slice));
        });
        plane_->slices_go_on({rounds.begin(), rounds.end()});
    }
    // Its new owner goes on after this round, and who lacks that one's average is given it.
    void settle(int slice, Round after, const std::map<int, Round>& claims) const {
        const int owner = survivors_->owner_of(slice);
        Plane& at = others[static_cast<std::size_t>(owner)]->plane();
        at.take_over(owner, slice, after);
        for (const auto& [rank, claimed] : claims) {
            if (claimed >= after) continue;
            const Flags flags = after.step % 5 ? 0 : unchanged;
            const Piece& piece = setting_.slices[static_cast<std::size_t>(slice)];
            const Bytes average(flags ? 0 : piece.whole_bytes);
            const int reply = static_cast<int>(Kind::reply);
            at.message(owner, {rank, reply, after.step, slice, -1, flags, no_token}, average.data(),
                       average.size());
            ++given;
        }
    }
    // What passes is whole frames; the reader checks their headers.
    void read(Plane::Id id) {
        const auto none = [this](const Header& h, const std::uint8_t*) -> std::uint8_t* {
            const bool is_norm = h.kind == static_cast<int>(Kind::norm_part);
            require(h.kind == barrier || (is_norm && h.payload_bytes) ||
                        (h.kind == static_cast<int>(Kind::push) && !h.payload_bytes),
                    "only what is not the plane's passes");
            norms_ += is_norm;
            return nullptr;
        };
        FrameReader frames(none, known, true,
                           [](const std::uint8_t*, std::size_t, std::size_t) {});
        Bytes room(10'000);
        while (const std::size_t got = plane_->read(id, room.data(), room.size())) {
            for (std::size_t at = 0; at < got;) {
                const auto wanted = frames.wanted();
                const std::size_t some = std::min(wanted.size, got - at);
                std::memcpy(wanted.data, room.data() + at, some);
                at += some;
                frames.advance(some);
            }
            ++passed_;
        }
        const End end = plane_->end_of(id);
        require(end.kind == End::closed || end.kind == End::broken, end.text.c_str());
    }
    void train(int steps) {
        for (Step step = 1; step <= steps && !lost_; ++step) {
            // new memory in each step: a sanitizer sees who still has the old one
            std::vector<Bytes> gradients, results;
            // the mean of two that are alike has their bits
            const auto value = static_cast<std::uint8_t>(setting_.workers == 2 ? 48 + step % 8 : 0);
            const bool copies = step % 2;
            for (int each = 0; each < sizes; ++each) {
                gradients.emplace_back(bytes_of(setting_, each), copies ? 77 : value);
                results.emplace_back(gradients.back().size(), 1);
            }
            const auto number = [&](int each) { return step * sizes - each; };
            std::thread device([&] {  // writes them, and a number behind each
                for (int each = sizes - 1; copies && each >= 0 && !lost_; --each) {
                    std::this_thread::sleep_for(std::chrono::microseconds(step % 3 * 100));
                    std::fill(gradients[each].begin(), gradients[each].end(), value);
                    std::atomic_ref(word_).store(number(each), std::memory_order_release);
                }
            });
            const Flags none = step % 5 ? 0 : no_gradient, measured = step % 3 ? measure : 0;
            for (int each = sizes - 1; each >= 0; --each) {
                plane_->push(each, step, gradient | none | measured, gradients[each].data(),
                             results[each].data(), copies ? &word_ : nullptr, number(each));
                const Frame about{each % setting_.workers, barrier, step, 0, each, 0, no_token};
                plane_->message(-1, about, results[0].data(), static_cast<std::size_t>(each));
            }
            plane_->pulls_due();
            for (int each = 0; each < sizes; ++each) {
                while (!plane_->is_complete(each) && !lost_) plane_->wait(each, 100);
                if (lost_) break;
                require(plane_->is_answered(each) == !none, "answers have values");
                if (!none) {
                    require(results[each] == after_travel(setting_, each, gradients[each]),
                            "averages are those of all");
                }
                gradients[each] = {};
                results[each] = {};
            }
            device.join();
            if (lost_) {  // what has not left may still be read
                kept_.swap(gradients);
                kept_results_.swap(results);
                return;
            }
            steps_ = static_cast<int>(step);
        }
        plane_->flush(1000);
    }
    void ask() {
        const int own = setting_.rank;
        for (int turn = 0; !ends_; ++turn) {
            plane_->missing(turn % sizes);
            plane_->step_of(turn % sizes);
            plane_->statistics();
            plane_->snapshot(own);
            plane_->last_push(own, turn % setting_.workers);
            plane_->same_batch(own);
            if (turn % 10 == 0) plane_->spans(own);
            if (turn % 9 == 0) plane_->spans(-1);
            if (turn == 20) plane_->tell_begins(own);
            if (turn % 7 == 0) plane_->learn({4, 3, 2, 1, 0});
            if (turn % 11 == 0) plane_->flush(1);
            if (turn % 13 == 0) plane_->has_heard(1);
            plane_->wait(turn % sizes, 1);
            plane_->ring();
        }
    }
    void write() {
        std::mt19937 random(static_cast<unsigned>(setting_.rank));
        while (!ends_) {
            const Plane::Id id = ids_[random() % ids_.size()];
            const std::size_t size = random() % 4 ? random() % 100 : random() % 300'000;
            const Header about{barrier, 0, 0, 1, 0, 0, static_cast<std::uint32_t>(size)};
            const Bytes payload(size, 7);
            const Bytes header(frame_of(about, payload));
            plane_->write(id, header.data(), header_bytes, payload.data(), size);
        }
    }
    // Connections that come and go: one that says nothing, one whose frames are damaged.
    void join_and_leave() {
        const int own = setting_.rank, stranger = (own + 1) % setting_.workers;
        int number = 0;
        while (setting_.slices[static_cast<std::size_t>(number)].server != own) ++number;
        const Bytes payload(setting_.slices[static_cast<std::size_t>(number)].size_bytes);
        const Header about{static_cast<int>(Kind::push), gradient,
                           static_cast<std::uint16_t>(stranger), 1,
                           static_cast<std::uint32_t>(number), 0,
                           static_cast<std::uint32_t>(payload.size())};
        Bytes damaged = frame_of(about, payload);
        damaged.back() ^= 1;
        for (int turn = 0; !ends_; ++turn) {
            const Pair sockets;
            const Plane::Id id = plane_->adopt(Plane::server, own, sockets.ends[0]);
            std::thread reader([&] {
                std::uint8_t room[64];
                while (plane_->read(id, room, sizeof room)) {
                }
            });
            if (turn % 2) {
                visit(id, stranger, sockets.ends[1], damaged);
            } else {
                const Bytes quiet = frame_of({barrier, 0, 1, 1, 0, 0, 0}, {});
                (void)!::send(sockets.ends[1], quiet.data(), quiet.size() / 2, MSG_NOSIGNAL);
            }
            plane_->release(id);
            plane_->release(id);
            plane_->carry(id, stranger);
            require(plane_->write(id, damaged.data(), header_bytes, nullptr, 0) == EBADF,
                    "a connection that is released takes nothing");
            reader.join();
            ::close(sockets.ends[1]);
        }
    }
    // It is asked for what has come damaged, though the connection may go at that moment.
    void visit(Plane::Id id, int peer, int fd, const Bytes& damaged) {
        if (setting_.workers > 2 || is_lost() || !visits_) return;
        plane_->carry(id, peer);
        for (int n = 0; n < 20; ++n)
            (void)!::send(fd, damaged.data(), damaged.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }

  public:
    static inline std::atomic<int> given = 0;  // averages, to who lacked them
    bool visits_ = false;  // nobody else is this peer

  private:
    const PlaneSetting setting_;
    Survivors* const survivors_;
    std::unique_ptr<Plane> plane_;
    std::vector<Plane::Id> ids_;
    std::vector<std::thread> threads_;
    std::thread training_;
    std::vector<Bytes> kept_, kept_results_;
    int links_[2];
    std::int64_t word_ = 0;
    std::atomic<bool> ends_ = false, lost_ = false;
    std::atomic<int> steps_ = 0;
    std::atomic<long> passed_ = 0, norms_ = 0;
};

void connect(std::vector<std::unique_ptr<Rank>>& ranks, std::vector<int>& last) {
    const int count = static_cast<int>(ranks.size());
    for (int rank = 0; rank < count; ++rank) {
        for (int server = 0; server < count; ++server) {
            const Pair sockets;
            if (rank == count - 1) last.push_back(sockets.ends[0]);
            if (server == count - 1) last.push_back(sockets.ends[1]);
            ranks[static_cast<std::size_t>(server)]->adopt(Plane::server, rank, sockets.ends[1]);
            ranks[static_cast<std::size_t>(rank)]->adopt(Plane::worker, server, sockets.ends[0]);
        }
    }
}

// `vanishes_at`: the last rank's connections break when it has made so many steps.
void train_together(int count, int steps, int vanishes_at, Reply reply = Reply::broadcast) {
    std::vector<std::unique_ptr<Rank>> ranks;
    std::vector<int> last;
    for (int rank = 0; rank < count; ++rank)
        ranks.push_back(std::make_unique<Rank>(rank, count, reply));
    connect(ranks, last);
    for (auto& each : ranks) each->start(steps);
    if (vanishes_at) {
        while (ranks.back()->steps() < vanishes_at)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        ranks.back()->vanish(last);
    }
    for (auto& each : ranks) each->wait();
    for (auto& each : ranks) {
        require(vanishes_at ? each->is_lost() : each->steps() == steps, "all make all steps");
        require(each->passed() > 0, "other frames have passed");
        require(each->norms() > 0, "servers have told what squares add up to");
    }
    for (auto& each : ranks) each->close();
    std::printf("%d ranks, %d steps%s\n", count, ranks[0]->steps(), vanishes_at ? ", one lost" : "");
    std::fflush(stdout);
}

// As before, and the others go on: those slices have other servers.
void outlive_the_last(int count, int steps, int vanishes_at) {
    Survivors survivors(count - 1);
    std::vector<std::unique_ptr<Rank>> ranks;
    std::vector<int> last;
    for (int rank = 0; rank < count; ++rank)
        ranks.push_back(std::make_unique<Rank>(rank, count, Reply::broadcast, &survivors));
    for (auto& each : ranks)
        for (int rank = 0; rank < count - 1; ++rank)
            each->others.push_back(ranks[static_cast<std::size_t>(rank)].get());
    connect(ranks, last);
    for (auto& each : ranks) each->start(steps);
    while (ranks.back()->steps() < vanishes_at)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ranks.back()->vanish(last, 300 * vanishes_at);
    for (auto& each : ranks) each->wait();
    for (auto& each : ranks)
        require(each == ranks.back() || each->steps() == steps, "survivors make all steps");
    for (auto& each : ranks) each->close();
    std::printf("%d ranks, %d outlive the last, %d averages given\n", count, count - 1,
                Rank::given.load());
    std::fflush(stdout);
}

// A server whose one peer sends damaged gradients while its connection is taken away.
void release_while_damaged_frames_come() {
    Rank alone(0, 2);
    alone.visits_ = true;
    const Pair sockets;
    alone.adopt(Plane::worker, 0, sockets.ends[0]);
    alone.adopt(Plane::server, 0, sockets.ends[1]);
    alone.start(0);
    alone.wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    alone.close();
}

}  // namespace

int main(int count, char** arguments) {
    const int steps = count > 1 ? std::atoi(arguments[1]) : 50;
    for (Reply reply : {Reply::broadcast, Reply::notify, Reply::pull})
        train_together(2, steps, 0, reply);
    train_together(3, steps, 0);
    train_together(3, 1'000'000, 5);
    for (int vanishes_at : {1, 2, 3, 4, 5, 6}) outlive_the_last(3, 12, vanishes_at);
    release_while_damaged_frames_come();
}
