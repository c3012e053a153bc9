-- Moves the end of leases. ARGV: lease_s, then per lease: rollout id, fence, attempt.
-- Reply: ok {lost, over, stale}: rollouts that are no longer the caller's; those in `over` (all of a deleted job) are nobody's any more.
-- stale: there is work that can no longer be in time.
local job = read_job()
local lost, over, ends = {}, {}, seconds() + tonumber(ARGV[1])
for i = 2, #ARGV, 3 do
  local rid = ARGV[i]
  if job and call('HGET', FENCES, rid) == ARGV[i + 1] then
    call('ZADD', LEASES, ends, rid)
  else
    local r = load(ROLLOUTS, rid)
    local ended = not r or r.attempt > tonumber(ARGV[i + 2]) or r.state ~= 'pending' and r.state ~= 'leased'
    local list = (not job or ended) and over or lost
    list[#list + 1] = rid
  end
end
local stale = job and #call('ZRANGEBYSCORE', OLDEST, '-inf', '(' .. whole(oldest_allowed(job)), 'LIMIT', 0, 1) > 0 or false
return reply('ok', { lost = lost, over = over, stale = stale })
