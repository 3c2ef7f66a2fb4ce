// One thread per process that looks after what is in flight: NCCL reports a broken connection, and a peer that never
// comes, to nobody unless somebody asks.  The thread exists while a team does, sleeps while nothing is in flight, and
// touches no team once the process has begun to end.  A forked child has none until it makes a team of its own.
#pragma once

namespace mgpu::nccl {

class Watched {
 public:
  virtual ~Watched() = default;
  // Whether something is in flight, so that it should be looked at again soon.  Acts on what it finds; only an
  // abort waits, with a limit.
  virtual bool look() noexcept = 0;
};

// Watches until unwatch is called.  Throws Error where the process can have no more threads.
void watch(Watched& watched);
// Nobody looks at it any more when this returns.  It need not be watched.
void unwatch(Watched& watched) noexcept;
// Tells the watchdog that something is in flight.
void wake_watchdog();

}  // namespace mgpu::nccl
