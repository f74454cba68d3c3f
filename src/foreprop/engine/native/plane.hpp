// The shell around the machines: sockets, memory, two threads. It decides nothing.
//
// Connections are Python's until it says that the plane carries their slices: from then on it takes
// gradients and averages out of what comes, and all other frames pass, in their order, to whoever
// reads the connection in Python; what Python sends leaves between the plane's frames. The sending
// thread writes what the machines let leave, small frames together; the receiving thread reads
// frames straight to where they belong, tells the machines, and adds up what is closed. The
// training thread hands gradients over and waits for parameters: it computes nothing, and never
// waits for a socket. A gradient that a device still copies is handed over before it is there: the
// sending thread looks for the number that the device writes behind it. A worker's slices at a
// server of its own process pass through memory.
//
// Locks, in the order in which they are taken: a machine's, then that of what is posted, or that of
// one connection's passing bytes. None is held while gradients are added up, or in a system call.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>

#include "connection.hpp"
#include "pacing.hpp"
#include "server.hpp"
#include "spans.hpp"
#include "squares.hpp"
#include "worker.hpp"

namespace foreprop {

class Plane {
  public:
    static constexpr Role worker = Role::worker, server = Role::server;
    using Id = Connection::Id;

    explicit Plane(PlaneSetting setting)
        : setting_(std::move(setting)),
          worker_(worker_setting()),
          gradients_(setting_.parameters, nullptr),
          results_(setting_.parameters, nullptr),
          leaving_(setting_.parameters),
          queued_ns_(setting_.parameters),
          complete_(setting_.parameters),
          answered_(setting_.parameters),
          left_out_(setting_.slices.size()),
          sums_(setting_.slices.size()),
          made_ns_(setting_.slices.size()),
          wake_sender_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
          wake_receiver_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
          sending_(epoll_create1(EPOLL_CLOEXEC)),
          receiving_(epoll_create1(EPOLL_CLOEXEC)) {
        for (auto& each : complete_) each = true;
        for (auto& each : answered_) each = false;
        for (const auto& [index, turns] : setting_.servers)
            servers_.emplace(index,
                             std::make_unique<Server>(server_setting(index, turns), setting_));
        watch(EPOLL_CTL_ADD, sending_, wake_sender_, EPOLLIN, 0);
        watch(EPOLL_CTL_ADD, receiving_, wake_receiver_, EPOLLIN, 0);
        sigset_t all, before;
        sigfillset(&all);  // signals are the other threads'
        pthread_sigmask(SIG_BLOCK, &all, &before);
        sender_ = std::thread([this] { send_all(); });
        receiver_ = std::thread([this] { receive_all(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    Plane(const Plane&) = delete;
    // Nobody is in a call, or will be. Threads are gone when this returns.
    ~Plane() {
        stopping_ = true;
        wake(wake_sender_);
        wake(wake_receiver_);
        sender_.join();
        receiver_.join();
        connections_.clear();
        for (int fd : {wake_sender_, wake_receiver_, sending_, receiving_}) close(fd);
    }

    std::vector<int> descriptors() const {
        return {wake_sender_, wake_receiver_, sending_, receiving_};
    }

    // Connections. Any thread.
    // The descriptor is the plane's from now on. `index`: the server's own, where it is one's.
    Id adopt(Role role, int index, int fd) {
        const int flags = fcntl(fd, F_GETFL);
        fcntl(fd, F_SETFL, flags | O_NONBLOCK);
        std::lock_guard lock(connections_mutex_);
        const Id id = ++last_id_;
        const auto room = [this](Connection& c, const Header& header, const std::uint8_t* raw) {
            return room_for(c, header, raw);
        };
        connections_[id] = std::make_shared<Connection>(id, role, index, fd, setting_, room);
        watch(EPOLL_CTL_ADD, sending_, fd, 0, id);
        watch(EPOLL_CTL_ADD, receiving_, fd, EPOLLIN, id);
        return id;
    }
    // Slices to and from this peer are the plane's from now on.
    void carry(Id id, int peer) {
        std::lock_guard lock(connections_mutex_);
        const auto found = connections_.find(id);
        if (found == connections_.end()) return;
        const Shared& connection = found->second;
        connection->peer = peer;
        by_peer_[{connection->role, connection->index, peer}] = connection;
        connection->carries = true;
    }
    // `waits`: a frame has left when about another third of what the kernel may hold can be taken.
    // `most_bytes`: what it may hold is adapted to the path, from this on; 0: not.
    void bound(Id id, bool waits, int most_bytes) {
        const auto connection = find(id);
        if (!connection) return;
        if (most_bytes) connection->bound = std::make_unique<SendBound>(most_bytes);
        connection->waits_for_room = waits;
    }
    // It passes the node's emulated links: files, and how long a byte takes. All connections the
    // same.
    void pace(Id id, int egress, int ingress, double seconds_per_byte) {
        const auto connection = find(id);
        if (!connection) return;
        std::lock_guard lock(connections_mutex_);
        if (!egress_) {
            egress_ = std::make_unique<Link>(egress, seconds_per_byte);
            ingress_ = std::make_unique<Link>(ingress, seconds_per_byte);
        }
        connection->is_paced = true;
    }
    // Bytes of frames that are not the plane's. Blocks until there are some; 0: why not is
    // `end_of`.
    std::size_t read(Id id, std::uint8_t* to, std::size_t most) {
        const auto connection = find(id);
        if (!connection) return 0;
        Connection& c = *connection;
        std::unique_lock lock(c.mutex);
        c.listens = true;
        if (setting_.elastic && c.passed.empty()) c.changed.notify_all();
        c.changed.wait(lock, [&] { return !c.passed.empty() || c.end.kind != End::open; });
        c.listens = false;
        const std::size_t some = std::min(most, c.passed.size());
        std::copy_n(c.passed.begin(), some, to);
        c.passed.erase(c.passed.begin(), c.passed.begin() + static_cast<std::ptrdiff_t>(some));
        if (c.is_full && c.passed.size() < Connection::most_passed_bytes / 2) {
            c.is_full = false;
            watch(EPOLL_CTL_MOD, receiving_, c.fd, EPOLLIN, id);
        }
        return some;
    }
    End end_of(Id id) {
        const auto connection = find(id);
        if (!connection) return {.kind = End::closed, .text = {}};
        std::lock_guard lock(connection->mutex);
        return connection->end;
    }
    // Blocks until a whole frame of Python's is with the kernel; the system's error, or 0.
    int write(Id id, const std::uint8_t* header, std::size_t size, const std::uint8_t* payload,
              std::size_t payload_size) {
        const auto connection = find(id);
        if (!connection) return EBADF;
        auto message = std::make_shared<std::vector<std::uint8_t>>(header, header + size);
        message->insert(message->end(), payload, payload + payload_size);
        const auto ticket = std::make_shared<bool>(false);
        post_whole(connection, message, ticket);
        std::unique_lock lock(connection->mutex);
        connection->changed.wait(lock, [&] { return *ticket || connection->send_error; });
        return *ticket ? 0 : connection->send_error.load();
    }
    // It ends: nobody reads or sends any more, and its descriptor goes when no thread is in it.
    void release(Id id) {
        std::shared_ptr<Connection> connection;
        {
            std::lock_guard lock(connections_mutex_);
            const auto found = connections_.find(id);
            if (found == connections_.end()) return;
            connection = found->second;
            connections_.erase(found);
            for (auto each = by_peer_.begin(); each != by_peer_.end();)
                each = each->second == connection ? by_peer_.erase(each) : std::next(each);
        }
        epoll_ctl(sending_, EPOLL_CTL_DEL, connection->fd, nullptr);
        epoll_ctl(receiving_, EPOLL_CTL_DEL, connection->fd, nullptr);
        finish(*connection, {.kind = End::closed, .text = {}});
        cannot_send(*connection, EPIPE);
        {
            std::lock_guard lock(posted_mutex_);
            released_.push_back(connection);
        }
        if (sender_sleeps_.exchange(false)) wake(wake_sender_);
    }

    // The training thread's.
    // The gradient is read `from` there, and the average written `to` there, until the parameter is
    // complete. With a `word` the gradient is there once that is this `number` or a larger one.
    void push(int parameter, Step step, Flags flags, const void* from, void* to,
              std::int64_t* word = nullptr, std::int64_t number = 0);
    // Another frame of the worker's (-1), or of an elastic session's server, which leaves in its
    // turn among the gradients, or the averages: so members hear of a change before any average
    // that it has changed.
    void message(int index, const Frame& about, const std::uint8_t* payload, std::size_t size) {
        auto whole = std::make_shared<std::vector<std::uint8_t>>(header_bytes + size);
        std::copy_n(payload, size, whole->data() + header_bytes);
        seal_whole(index == -1 ? setting_.rank : index, about, *whole);
        const Frame frame = keep_whole(about, std::move(whole));
        if (index == -1) {
            std::lock_guard lock(worker_mutex_);
            post(worker, setting_.rank, worker_.message_ready(frame));
        } else {
            Server& own = *servers_.at(index);
            std::lock_guard lock(own.mutex);
            post(server, index, own.machine.message_ready(frame));
        }
    }
    // The values to begin from come to `results`, by parameter.
    void await_values(Step step, void* const* results) {
        std::lock_guard lock(worker_mutex_);
        for (int each = 0; each < setting_.parameters; ++each) {
            results_[each] = static_cast<std::uint8_t*>(results[each]);
            answered_[each] = complete_[each] = false;
        }
        worker_.values_awaited(step);
        for (int each = 0; each < setting_.parameters; ++each)
            complete_[each] = worker_.is_complete(each);
    }
    // The next forward pass begins; matters where workers pull.
    void pulls_due() {
        std::lock_guard lock(worker_mutex_);
        for (Copying& each : copying_) each.pulls = true;
        post(worker, setting_.rank, worker_.pulls_due());
    }
    void learn(const std::vector<int>& order) {
        std::lock_guard lock(worker_mutex_);
        worker_.priorities_learned(order);
    }
    bool is_complete(int parameter) const { return complete_[parameter]; }
    // Whether any of what is complete has come with values.
    bool is_answered(int parameter) const { return answered_[parameter]; }
    // Whether it is complete; for so long at most, or until somebody rings.
    bool wait(int parameter, int timeout_ms) {
        std::unique_lock lock(bell_mutex_);
        const auto rings = rings_;
        const auto over = [&] { return complete_[parameter] || rings_ != rings; };
        bell_.wait_for(lock, std::chrono::milliseconds(timeout_ms), over);
        return complete_[parameter];
    }
    // Wakes whoever waits.
    void ring() {
        {
            std::lock_guard lock(bell_mutex_);
            ++rings_;
        }
        bell_.notify_all();
    }
    // Whether all that has been pushed has left within this time.
    bool flush(int timeout_ms) {
        std::unique_lock lock(bell_mutex_);
        return bell_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] {
            std::lock_guard own(worker_mutex_);
            return idle();
        });
    }

    // Codecs.
    // The loss's scale from this step on: the worker's (-1), or what rank 0 has told a server.
    void tell_scale(int index, Step step, double scale) {
        if (index == -1) return scales_.announce(step, scale);
        Server& own = *servers_.at(index);
        own.scales.announce(step, scale);
        has_told(own);
    }
    void put_residual(int index, int slice, SliceResidual::State state) {
        residual(index, slice).put(std::move(state));
        if (index != -1) has_told(*servers_.at(index));
    }
    // What a slice's codes have left out, at the worker (-1) or of a server's averages.
    SliceResidual& residual(int index, int slice) {
        const auto at = static_cast<std::size_t>(slice);
        return index == -1 ? left_out_.at(at) : servers_.at(index)->left_out.at(at);
    }

    // Elastic sessions.
    Departure drop(int index, int rank) {
        Server& own = *servers_.at(index);
        std::lock_guard lock(own.mutex);
        for (std::size_t slice = 0; slice < sums_.size(); ++slice)
            if (own.machine.owns(static_cast<int>(slice))) std::erase(sums_[slice].owed, rank);
        return own.machine.peer_dropped(rank);
    }
    Promise join(int index, int rank, Step step) {
        Server& own = *servers_.at(index);
        std::lock_guard lock(own.mutex);
        return own.machine.join_asked(rank, step);
    }
    void settle(int index, int rank, Step step) {
        Server& own = *servers_.at(index);
        std::lock_guard lock(own.mutex);
        own.machine.join_settled(rank, step);
    }
    void go_on(int index) {
        servers_.at(index)->goes_on = true;
        if (receiver_sleeps_.exchange(false)) wake(wake_receiver_);
    }
    void take_over(int index, int slice, Round after) {
        Server& own = *servers_.at(index);
        std::lock_guard lock(own.mutex);
        own.machine.slice_settled(slice, setting_.names[setting_.slices[slice].parameter], after);
    }
    bool has_sent_all(int index, int rank) {
        Server& own = *servers_.at(index);
        std::lock_guard lock(own.mutex);
        return own.machine.has_sent_all(rank);
    }
    // Rounds that have counted other ranks than the slice's round before, since the last time.
    struct CountedSet {
        int slice;
        Step step;
        std::vector<int> ranks;
    };
    // As many as fit into so many numbers, three and one for each rank.
    std::vector<CountedSet> counted_sets(int index, std::size_t most) {
        Server& own = *servers_.at(index);
        std::lock_guard lock(own.mutex);
        auto& sets = own.counted_sets;
        std::size_t size = 0;
        const auto fits = [&](const CountedSet& each) {
            size += 3 + each.ranks.size();
            return size <= most;
        };
        const auto end = std::find_if_not(sets.begin(), sets.end(), fits);
        std::vector<CountedSet> taken(std::make_move_iterator(sets.begin()),
                                      std::make_move_iterator(end));
        sets.erase(sets.begin(), end);
        return taken;
    }
    void slices_lost(int gone, const std::vector<std::pair<int, int>>& owners) {
        std::lock_guard lock(worker_mutex_);
        post(worker, setting_.rank, worker_.slices_lost(gone, owners));
    }
    void slices_go_on(const std::vector<std::pair<int, Round>>& rounds) {
        std::lock_guard lock(worker_mutex_);
        post(worker, setting_.rank, worker_.slices_go_on(rounds));
    }
    void came_after(Step step) {
        std::lock_guard lock(worker_mutex_);
        worker_.came_after(step);
    }
    struct SliceView {
        int owner;
        Round claim;
        bool unchanged;
        Step awaited;
        Round open;
    };
    SliceView slice(int number) {
        std::lock_guard lock(worker_mutex_);
        return {worker_.owner_of(number), worker_.claim(number), worker_.was_unchanged(number),
                worker_.awaited_step(number), worker_.open_round(number)};
    }
    // Whether Python has read all that has passed from servers, and waits for more.
    bool has_heard(int timeout_ms) {
        const auto until =
            std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
        std::vector<Shared> all;
        {
            std::lock_guard lock(connections_mutex_);
            for (const auto& [_, each] : connections_)
                if (each->role == worker) all.push_back(each);
        }
        return std::all_of(all.begin(), all.end(), [&](const Shared& each) {
            std::unique_lock lock(each->mutex);
            return each->changed.wait_until(lock, until, [&] {
                return each->passed.empty() && (each->listens || each->end.kind != End::open);
            });
        });
    }

    // For reports.
    // Slices of a parameter that are not answered, and whether each has left; 2: it is being copied.
    std::vector<std::pair<int, int>> missing(int parameter);
    Step step_of(int parameter);
    struct Statistics {
        std::int64_t pushes, pushed_bytes, replies, reply_bytes, most_queued, queued, awaited;
        std::int64_t raw_pushed_bytes, raw_reply_bytes;  // as they were without codecs
    };
    Statistics statistics() {
        std::lock_guard lock(worker_mutex_);
        return {pushes_,          pushed_bytes_,         replies_,
                reply_bytes_,     worker_.most_queued(), worker_.queue_depth(),
                worker_.awaited(), raw_pushed_bytes_,    raw_reply_bytes_};
    }

    // A server's, in this process.
    struct Snapshot {
        int slice, priority;
        Round done, round;
        std::map<int, Flags> pushed;
    };
    std::vector<Snapshot> snapshot(int index) {
        Server& own = *servers_.at(index);
        std::vector<Snapshot> all;
        std::lock_guard lock(own.mutex);
        own.machine.each([&](int slice, int priority, Round done, Round round,
                             const std::map<int, Flags>& pushed) {
            all.push_back({slice, priority, done, round, pushed});
        });
        return all;
    }
    // What a peer has pushed last: slice and step; -1: nothing.
    std::pair<int, Step> last_push(int index, int peer) {
        Server& own = *servers_.at(index);
        std::lock_guard lock(own.mutex);
        return own.last.at(static_cast<std::size_t>(peer));
    }
    // It has said goodbye; why others cannot go on without it, if so, ends its connection.
    void left(int index, int peer) {
        Server& own = *servers_.at(index);
        std::lock_guard lock(own.mutex);
        post(server, index, own.machine.peer_left(peer));
    }
    // The first push of each step of each peer passes from now on, without its gradient; now those
    // that have been here, behind what each peer has said before.
    void tell_begins(int index) {
        Server& own = *servers_.at(index);
        std::lock_guard lock(own.mutex);
        if (std::exchange(own.tells_begins, true)) return;
        for (int peer = 0; peer < setting_.workers; ++peer) {
            const auto [slice, step] = own.last[static_cast<std::size_t>(peer)];
            if (slice < 0) continue;
            if (const Shared connection = find(server, index, peer))
                tell_begin(*connection, slice, step, 0, 0);
        }
    }
    // What has happened to slices since the last time, at the worker (-1) or a server.
    std::pair<std::vector<Span>, int> spans(int index) {
        return index == -1 ? spans_.take() : servers_.at(index)->spans.take();
    }
    // How often all ranks have pushed the same of one slice; 0 once they have not.
    int same_batch(int index) const { return servers_.at(index)->same_batch; }

  private:
    struct Server {
        Server(ServerSetting own, const PlaneSetting& setting)
            : index(own.index),
              machine(std::move(own)),
              rooms(setting.slices.size()),
              squares(setting.slices.size()),
              rounds(setting.slices.size()),
              left_out(setting.slices.size()),
              last(static_cast<std::size_t>(setting.workers), {-1, 0}) {
            for (std::size_t slice = 0; slice < rooms.size(); ++slice)
                if (setting.elastic || setting.slices[slice].server == index)
                    rooms[slice].resize(static_cast<std::size_t>(setting.workers));
            watches = index == 0 && setting.workers > 1;
        }
        const int index;
        std::mutex mutex;
        ServerMachine machine;
        std::vector<std::vector<Buffer>> rooms;  // by slice and rank: the receiving thread's
        std::vector<std::vector<SquareSum>> squares;  // by slice, of its parameters: its, too
        struct Noted {
            Round round;
            bool builds_on;  // on the one before
        };
        // By slice that has a codec, since its last code: the first round, and the latest. Its, too.
        std::vector<std::vector<Noted>> rounds;
        std::vector<SliceResidual> left_out;  // of the averages' codes
        // What rank 0 announces passes to Python, which tells what of it matters here.
        Scales scales;
        std::int64_t announced = 0, needed = 0;  // all that came, and before rank 0's last push
        std::mutex told_mutex;
        std::condition_variable telling;
        std::int64_t told = 0;
        std::vector<std::pair<int, Step>> last;
        bool tells_begins = false;
        std::vector<CountedSet> counted_sets;
        std::atomic<bool> goes_on = false;  // what was held is to be closed
        Spans spans;
        bool watches;                                     // whether all ranks push the same
        std::map<std::pair<int, std::size_t>, int> same;  // by slice and place
        std::atomic<int> same_batch = 0;
    };

    static constexpr std::size_t direct_bytes = 16'384;    // from here on not by way of the buffer
    static constexpr std::size_t together_bytes = 65'536;  // of small frames in one system call
    static constexpr int most_frames = 64;
    static constexpr int most_damaged = 1000;  // that a peer may be asked for again
    static constexpr auto most_told_wait = std::chrono::milliseconds(100);
    static constexpr std::int64_t look_ns = 50'000;  // between looks for what is copied

    WorkerSetting worker_setting() const {
        WorkerSetting made{.slices = {},
                           .parameters = setting_.parameters,
                           .order = setting_.order,
                           .reply = setting_.reply,
                           .turns = setting_.turns,
                           .packs = setting_.packs,
                           .outlives = setting_.elastic,
                           .window_sizes_bytes = setting_.window_sizes_bytes,
                           .window_bytes = setting_.window_bytes,
                           .window_servers = setting_.window_servers};
        for (const Piece& piece : setting_.slices)
            made.slices.push_back({piece.parameter, piece.server});
        return made;
    }
    ServerSetting server_setting(int index, Turns turns) const {
        ServerSetting made{.index = index,
                           .workers = setting_.workers,
                           .started = setting_.started,
                           .elastic = setting_.elastic,
                           .order = setting_.order,
                           .reply = setting_.reply,
                           .turns = turns,
                           .slices = {},
                           .names = {}};
        for (int number = 0; number < static_cast<int>(setting_.slices.size()); ++number) {
            const Piece& piece = setting_.slices[number];
            if (piece.server != index) continue;
            made.slices.push_back(number);
            made.names.push_back(setting_.names[piece.parameter]);
        }
        return made;
    }

    static void has_told(Server& own) {
        {
            std::lock_guard lock(own.told_mutex);
            ++own.told;
        }
        own.telling.notify_all();
    }
    // As `epoll_wait`, until some time at most (0: none). It takes milliseconds, links nanoseconds.
    static int wait_for(int epoll, std::vector<epoll_event>& events, bool polls,
                        std::int64_t until_ns) {
        const auto most = static_cast<int>(events.size());
        if (polls || !until_ns) return epoll_wait(epoll, events.data(), most, polls ? 0 : -1);
        const std::int64_t left_ns = std::max<std::int64_t>(0, until_ns - now_ns());
        const timespec left{.tv_sec = left_ns / 1'000'000'000, .tv_nsec = left_ns % 1'000'000'000};
        pollfd asked{.fd = epoll, .events = POLLIN, .revents = 0};
        if (ppoll(&asked, 1, &left, nullptr) <= 0) return 0;
        return epoll_wait(epoll, events.data(), most, 0);
    }
    static bool is(const Frame& frame, Kind kind) { return frame.kind == static_cast<int>(kind); }
    static void watch(int what, int epoll, int fd, std::uint32_t events, Id id) {
        epoll_event event{.events = events, .data = {.u64 = id}};
        epoll_ctl(epoll, what, fd, &event);
    }
    static void wake(int fd) {
        const std::uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(fd, &one, sizeof one);
    }
    static void slept(int fd) {
        std::uint64_t count;
        [[maybe_unused]] const auto got = ::read(fd, &count, sizeof count);
    }

    Shared find(Id id) {
        std::lock_guard lock(connections_mutex_);
        const auto found = connections_.find(id);
        return found == connections_.end() ? nullptr : found->second;
    }
    Shared find(Role role, int own, int peer) {
        std::lock_guard lock(connections_mutex_);
        const auto found = by_peer_.find({role, role == worker ? -1 : own, peer});
        return found == by_peer_.end() ? nullptr : found->second;
    }

    // A connection's end, which whoever reads it hears of when all before has been read.
    void finish(Connection& connection, End end) {
        {
            std::lock_guard lock(connection.mutex);
            if (connection.end.kind == End::open) connection.end = std::move(end);
        }
        connection.changed.notify_all();
    }
    void cannot_send(Connection& connection, int error) {
        {
            std::lock_guard lock(connection.mutex);
            if (!connection.send_error) connection.send_error = error;
        }
        connection.changed.notify_all();
    }
    void refuse(Connection& connection, const ProtocolError& error) {
        epoll_ctl(receiving_, EPOLL_CTL_DEL, connection.fd, nullptr);
        End end{.kind = End::refused, .text = error.what()};
        if (error.whose == ProtocolError::apart) end.kind = End::apart;
        if (error.whose == ProtocolError::training) {
            end.kind = End::failed;
            end.number = -1;
        }
        finish(connection, end);
    }

    // What a machine has said, for the threads. Under the machine's lock, so that frames for one
    // peer are queued in the order in which they were let go. `own`: the rank, or the index.
    void post(Role role, int own, const Instructions& told) {
        bool any = false, here = false;
        {
            std::lock_guard lock(posted_mutex_);
            for (const Instruction& each : told) {
                if (each.what != Instruction::send) continue;
                const int peer = each.frame.peer;
                if (role == worker ? servers_.contains(peer) : peer == setting_.rank) {
                    here_.push_back({role, own, each.frame});
                    here = true;
                } else {
                    if (role == worker) note_leaving(each.frame);
                    posted_.push_back({role, own, each.frame});
                    any = true;
                }
            }
        }
        if (any && sender_sleeps_.exchange(false)) wake(wake_sender_);
        if (here && receiver_sleeps_.exchange(false)) wake(wake_receiver_);
    }

    // A frame that leaves before what is queued; nothing if the connection has been released.
    void post_whole(const Shared& connection, const Buffer& whole,
                    const std::shared_ptr<bool>& ticket = std::make_shared<bool>(false)) {
        if (!connection) return;
        {
            std::lock_guard lock(posted_mutex_);
            messages_.push_back({connection, whole, ticket});
        }
        if (sender_sleeps_.exchange(false)) wake(wake_sender_);
    }

    // Its gradient is read until it has left. Under the worker's lock.
    void note_leaving(const Frame& frame) {
        if (is(frame, Kind::push) && frame.token == no_token)
            ++leaving_[setting_.slices[frame.slice].parameter];
    }
    // A frame that leaves as it is in its turn, until then kept by its token.
    Frame keep_whole(Frame frame, Buffer whole) {
        std::lock_guard lock(posted_mutex_);
        frame.token = ++last_token_;
        whole_[frame.token] = std::move(whole);
        return frame;
    }

    // Under the worker's lock.
    const Copying* copying_of(int parameter) const;
    bool idle() const { return worker_.idle() && copying_.empty(); }
    void gradient_is_here(int parameter, Step step, Flags flags);

    // The sending thread (`sending.hpp`).
    void send_all();
    void take_copied();
    void take_posted();
    Buffer message_of(const Frame& frame);
    static void add_whole(Outgoing& out, Buffer whole);
    void enqueue(Connection& connection, const Frame& frame);
    const std::uint8_t* gradient_of(const Piece& piece) const;
    Buffer leaving_gradient(const Piece& piece, const Frame& push);
    Buffer coded(SliceResidual& left_out, const Piece& piece, Round round, const void* from);
    static void decode_to(std::uint8_t* to, const Piece& piece, const Frame& frame,
                          const Buffer& code);
    Buffer decoded(const Piece& piece, const Frame& frame, const Buffer& code);
    int sender_on(const Connection& connection) const;
    void seal(int sender, const Frame& frame, const std::uint8_t* payload, std::size_t size,
              std::uint8_t* out) const;
    void seal_whole(int sender, const Frame& frame, std::vector<std::uint8_t>& whole) const;
    void flush(Connection& connection);
    void abandon(Connection& connection);
    void give_up(Role role, int own, const Frame& frame, bool told = false);
    void has_left(Connection& connection, const Outgoing& gone);
    Spans& spans_on(Role role, int own);
    void note_sent(Role role, int own, const Outgoing& gone);
    void note_ready(int parameter);
    static bool has_room(int fd);
    static void adapt(Connection& connection);
    static void add(iovec* parts, int& count, const std::uint8_t* data, std::size_t size,
                    std::size_t& skip, std::size_t& most);
    bool may_leave(Connection& connection);
    std::vector<Shared> due(std::vector<Shared>& all, std::int64_t Connection::* when);
    static std::int64_t first(const std::vector<Shared>& all, std::int64_t Connection::* when);
    void set_waiting(Connection& connection, bool waits);
    void tell_sent(Connection& connection);
    void ring_if_idle();

    // The receiving thread (`receiving.hpp`).
    void receive_all();
    void take_own();
    void pass_own(int index, Connection* knows, const Frame& frame);
    void answer_own(int index, Connection& connection, const Frame& frame);
    void land(int from, const Frame& reply, const std::uint8_t* data, std::size_t size);
    void note_own(Role role, int index, const Frame& frame);
    std::size_t bytes_of(const Frame& frame, Flags empty) const;
    void drain(Connection& connection);
    bool drain_some(Connection& connection);
    bool take_in(Connection& c, bool direct);
    bool pauses(Connection& connection);
    void arrive(Connection& connection);
    void took(Connection& connection, std::size_t bytes);
    void came_to_worker(int server, const Frame& frame, std::size_t bytes, std::int64_t began_ns);
    void came_to_server(Connection* connection, Server& at, int rank, const Frame& frame,
                        std::int64_t began_ns);
    void ask_again(Connection& connection, const FrameReader::Arrived& came);
    std::uint8_t* room_for(Connection& connection, const Header& header, const std::uint8_t* raw);
    void push_came(Connection* connection, Server& at, int rank, const Frame& push,
                   std::int64_t began_ns);
    void tell_begin(Connection& connection, int slice, Step step, int priority, Flags flags);
    void carry_out(Connection* connection, Server& at, Instructions& told,
                   std::unique_lock<std::mutex>& lock);
    bool is_answered(Server& at, int slice) const;
    bool owns(int index, std::size_t slice);
    Buffer combine(Server& at, const Instruction& update);
    void push_own(Server& at, const Frame& push);
    void note_round(Server& at, int rank, const Frame& push) const;
    Buffer coded_average(Server& at, const Instruction& update, const Buffer& sum,
                         std::uint8_t* own);
    static void note_passing(Server& at, int rank, int kind, Flags flags);
    std::int64_t raw_bytes_of(const Frame& frame) const;
    void measure(Server& at, const Instruction& update, const Buffer& sum) const;
    void check_finite(const Piece& piece, const std::uint8_t* part, int rank, Step step) const;
    void send_squares(Server& at, Step step);
    template <class Each>
    static void reduce_as(std::uint8_t* sum, std::uint8_t* own,
                          const std::vector<const std::uint8_t*>& bytes, std::size_t size,
                          const Reduction& reduction);
    void compare(Server& at, int slice, const std::vector<const std::uint8_t*>& parts) const;
    bool completes(int parameter);
    void reply_came(int from, const Frame& reply, std::size_t bytes, std::int64_t began_ns);
    template <class Event>
    void worker_heard(Event event);

    struct Posted {
        Role role;
        int own;
        Frame frame;
    };
    struct Message {
        Shared connection;
        Buffer data;
        std::shared_ptr<bool> ticket;
    };

    Buffers buffers_;  // first: it outlives all that has memory of it
    const PlaneSetting setting_;
    std::mutex worker_mutex_, posted_mutex_, bell_mutex_, connections_mutex_;
    WorkerMachine worker_;
    std::map<int, std::unique_ptr<Server>> servers_;
    std::map<Id, Shared> connections_;
    std::map<std::tuple<Role, int, int>, Shared> by_peer_;
    Id last_id_ = 0;
    std::unique_ptr<Link> egress_, ingress_;   // if the node's are emulated
    std::vector<Shared> clearing_, arriving_;  // connections whose bytes are passing them
    std::vector<const std::uint8_t*> gradients_;
    std::vector<std::uint8_t*> results_;
    // by parameter, its slices that are to leave to other processes, and are not with the kernel
    std::vector<int> leaving_;
    // when it was pushed, in steps that are even and odd: the next may begin before one has left
    std::vector<std::array<std::int64_t, 2>> queued_ns_;
    Spans spans_;  // the worker's
    std::vector<std::atomic<bool>> complete_, answered_;
    std::vector<Copying> copying_;  // in the order of their numbers; under the worker's lock
    std::atomic<bool> copies_ = false;  // whether there are any
    struct Sum {
        Buffer data;
        std::vector<int> owed;  // other ranks to which it has still to be sent
    };
    Scales scales_;                        // of the loss, as this rank's loop has told
    std::vector<SliceResidual> left_out_;  // by slice, of the codes that this rank pushes
    std::vector<Sum> sums_;                // by slice: what is answered; under its server's lock
    std::vector<std::int64_t> made_ns_;  // and when it was made
    std::vector<Posted> posted_;
    std::deque<Posted> here_;
    std::vector<Message> messages_;
    std::vector<Shared> released_;  // nobody reads or sends on them any more
    std::map<std::int64_t, Buffer> whole_;  // of the worker's, by token, until they leave
    std::int64_t last_token_ = no_token;
    std::condition_variable bell_;
    std::uint64_t rings_ = 0;
    std::int64_t pushes_ = 0, pushed_bytes_ = 0, replies_ = 0, reply_bytes_ = 0;
    std::int64_t raw_pushed_bytes_ = 0, raw_reply_bytes_ = 0;
    std::atomic<bool> stopping_ = false;
    std::atomic<bool> sender_sleeps_ = false, receiver_sleeps_ = false;
    std::uint8_t nowhere_[1];
    int wake_sender_, wake_receiver_, sending_, receiving_;
    std::thread sender_, receiver_;
};

}  // namespace foreprop

#include "receiving.hpp"
#include "sending.hpp"
